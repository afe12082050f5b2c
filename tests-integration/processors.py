"""Logits processors for the tests, importable by name, also by other processes."""

from __future__ import annotations

import torch

from headrace.logits_process import (
    AdapterLogitsProcessor,
    LogitsProcessor,
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
