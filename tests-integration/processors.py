"""Logits processors for the tests, importable by name, also by other processes."""

from __future__ import annotations

import torch

from headrace.logits_process import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)


def _target(params):
    return (params.extra_args or {}).get("target_token")


class _Checked:
    @classmethod
    def validate_params(cls, sampling_params):
        target = _target(sampling_params)
        if target is not None and type(target) is not int:
            raise ValueError(f"target_token = {target!r}: must be an integer")


class TargetToken(_Checked, LogitsProcessor):
    """Only ``target_token`` of a request's extra arguments is possible."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        process_dict_updates(self.targets, batch_update, lambda params, *_: _target(params))

    def apply(self, logits):
        if not self.targets:
            return logits
        slots, tokens = list(self.targets), list(self.targets.values())
        kept = logits[slots, tokens]
        logits[slots] = -torch.inf
        logits[slots, tokens] = kept
        return logits


class AdaptedTargetToken(_Checked, AdapterLogitsProcessor):
    """The same, request by request."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = _target(params)
        if target is None:
            return None

        def force(output_ids, row):
            forced = torch.full_like(row, -torch.inf)
            forced[target] = row[target]
            return forced

        return force


class Recorder(LogitsProcessor):
    """Changes nothing; replays the updates and checks what it is given in every step."""

    made: list[Recorder] = []  # noqa: RUF012

    def __init__(self, config, device, is_pin_memory):
        self.slots = {}
        self.lengths = {}
        self.outputs = {}
        self.problems = []
        self.num_steps = self.largest = self.num_moves = 0
        self.made.append(self)

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        self.num_steps += 1
        if batch_update is None:
            return
        for slot in batch_update.removed:
            del self.slots[slot]
        for slot, params, prompt_ids, output_ids in batch_update.added:
            name = params.extra_args["name"]
            self.slots[slot] = name
            self.outputs[name] = output_ids
            self.lengths[name] = len(output_ids)
            if prompt_ids != params.extra_args["prompt"]:
                self.problems.append(f"{name}: prompt {prompt_ids}")
        for source, target, kind in batch_update.moved:
            assert kind is MoveDirectionality.UNIDIRECTIONAL
            self.slots[target] = self.slots.pop(source)
            self.num_moves += 1
        if sorted(self.slots) != list(range(batch_update.batch_size)):
            self.problems.append(f"slots {self.slots} for {batch_update}")
        if len(set(self.slots.values())) != len(self.slots):
            self.problems.append(f"twice in {self.slots}")

    def apply(self, logits):
        self.largest = max(self.largest, len(self.slots))
        if logits.shape[0] != len(self.slots):
            self.problems.append(f"{logits.shape[0]} rows for {len(self.slots)} requests")
        for slot, name in self.slots.items():
            grown = len(self.outputs[name]) - self.lengths[name]
            self.lengths[name] += grown
            if grown not in (0, 1):
                self.problems.append(f"{name} in slot {slot} grew by {grown}")
        return logits


class Scripted(AdapterLogitsProcessor):
    """The next token of a request's ``script`` is by far the likeliest, if a constraint admits it."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        script = (params.extra_args or {}).get("script")
        if script is None:
            return None

        def follow(output_ids, row):
            if len(output_ids) < len(script):
                row[script[len(output_ids)]] += 1e4
            return row

        return follow
