"""A worker without a model that checks every step it is given, for tests of schedulers.

Its "keys and values" are fingerprints of the prefix that ends at a token, and the token that it
samples is a function of that fingerprint. So whatever a scheduler does (chunks, prefix hits,
preemptions, reordering), a request must yield :func:`expected_tokens`, and a slot that was not
written, or was overwritten by somebody else, is seen at the first read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_core.kv import NULL_BLOCK, CrossAttentionSpec, KVCacheConfig, SlidingWindowSpec
from headrace_core.modality import MediaInput
from headrace_core.step import (
    NewRequest,
    RequestStepResult,
    ScheduledStep,
    StepResult,
    TokenLogprobs,
)

_PRIME = 2**61 - 1


def fingerprint(token_ids: Sequence[int], previous: int = 1) -> int:
    """Of a prefix; ``previous`` continues the one that ends before ``token_ids``."""
    for token_id in token_ids:
        previous = (previous * 1_000_003 + token_id + 7) % _PRIME
    return previous


def contents(token_ids: Sequence[int], media: Sequence[MediaInput]) -> list[int]:
    """What fingerprints are made of: ids, and for placeholders the part of the item they stand for."""
    found = list(token_ids)
    for item in media:
        digest = int(item.content_hash, 16)
        for index in range(item.num_tokens):
            if 0 <= item.offset + index < len(found):
                found[item.offset + index] = digest + index
    return found


def sampled_token(prefix_fingerprint: int, vocab_size: int) -> int:
    """What the checking worker "samples" after a prefix."""
    return (prefix_fingerprint >> 11) % vocab_size


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The output of a straight run, without stopping."""
    state, output = fingerprint(prompt), list[int]()
    for _ in range(count):
        output.append(sampled_token(state, vocab_size))
        state = fingerprint(output[-1:], state)
    return output


@dataclass
class _Held:
    """A request in the worker's memory."""

    new: NewRequest
    token_ids: list[int]
    fingerprints: list[int]
    """By position."""
    tables: tuple[list[int], ...]
    num_computed_tokens: int
    encoding: int = 0
    """Stands for the encoder states: another one each time that they are computed."""

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        start = len(self.fingerprints)
        for content in contents(self.token_ids, self.new.media)[start:]:
            previous = self.fingerprints[-1] if self.fingerprints else 1
            self.fingerprints.append(fingerprint((content,), previous))


class CheckingWorker:
    """Executes steps on fingerprints and raises AssertionError at the first broken promise.

    Args:
        config: the cache that the scheduler's manager hands out.
        vocab_size: sampled tokens are below this.
    """

    def __init__(self, config: KVCacheConfig, vocab_size: int = 5) -> None:
        self.vocab_size = vocab_size
        self.num_computed = 0
        """Tokens over all steps."""
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._windows = [
            group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else None
            for group in config.groups
        ]
        self._is_cross = [isinstance(group.spec, CrossAttentionSpec) for group in config.groups]
        self._num_encoded = 0
        self._held: dict[str, _Held] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        """Slot -> (group, fingerprint)."""
        self._next_step_id = 0
        self._unsure: set[str] = set()
        """Who a failed step said is gone: it may be said again."""

    def execute(self, step: ScheduledStep) -> StepResult:
        assert step.step_id == self._next_step_id, "steps must be executed in order"
        self._next_step_id += 1
        self._apply(step)
        self._write_all(step)
        results = {
            request_id: self._read_and_sample(self._held[request_id], count)
            for request_id, count in step.num_scheduled_tokens.items()
        }
        return StepResult(step.step_id, results)

    def skip(self, step: ScheduledStep) -> None:
        """Execute nothing of a step, as if it had failed after its requests were taken in."""
        self._next_step_id += 1
        self._apply(step)
        self._unsure.update(step.gone_request_ids)

    def _apply(self, step: ScheduledStep) -> None:
        for request_id in step.gone_request_ids:
            known = request_id in self._held or request_id in self._unsure
            assert known, f"{request_id!r} is gone, but was not here"
            self._held.pop(request_id, None)
        for new in step.new_requests:
            assert new.request_id not in self._held, f"{new.request_id!r} is new, but here"
            assert new.request_id in step.num_scheduled_tokens, f"{new.request_id!r} does not run"
            assert 0 <= new.num_computed_tokens < len(new.token_ids)
            tables = tuple(list(block_ids) for block_ids in new.block_ids)
            held = _Held(new, [], [], tables, new.num_computed_tokens)
            held.append(new.token_ids)
            self._held[new.request_id] = held
        fresh = {new.request_id for new in step.new_requests}
        for request_id, gained in step.new_block_ids.items():
            assert request_id in step.num_scheduled_tokens, f"{request_id!r} does not run"
            assert request_id not in fresh, f"{request_id!r} got its table with the request"
            for table, block_ids in zip(self._held[request_id].tables, gained, strict=True):
                table.extend(block_ids)

    def _write_all(self, step: ScheduledStep) -> None:
        writers = self._possible_writers()
        for request_id, count in step.num_scheduled_tokens.items():
            assert count >= 1, f"{request_id!r} runs with {count} tokens"
            held = self._held[request_id]
            start, end = held.num_computed_tokens, held.num_computed_tokens + count
            assert end <= len(held.token_ids), f"{request_id!r}: token {end - 1} does not exist"
            limit = held.new.params.max_tokens
            assert limit is None or end < held.new.num_prompt_tokens + limit, (
                f"{request_id!r} computes its last token, which nobody needs"
            )
            self.num_computed += count
            if start == 0:
                self._num_encoded += 1
                held.encoding = self._num_encoded
            for group, table in enumerate(held.tables):
                for position in self._written(held, group, end):
                    block_id = table[position // self._block_size]
                    assert NULL_BLOCK < block_id < self._num_blocks
                    assert writers[block_id] == {(request_id, group)}, (
                        f"block {block_id} can be written by {sorted(writers[block_id])}"
                    )
                    slot = block_id * self._block_size + position % self._block_size
                    self._slots[slot] = (group, self._value(held, group, position))

    def _written(self, held: _Held, group: int, end: int) -> range:
        """Positions that a step up to ``end`` writes: encoder states all with the first tokens."""
        start = held.num_computed_tokens
        if not self._is_cross[group]:
            return range(start, end)
        return range(0 if start else held.new.num_encoder_tokens)

    def _value(self, held: _Held, group: int, position: int) -> int:
        if not self._is_cross[group]:
            return held.fingerprints[position]
        return fingerprint((held.encoding, position))

    def _possible_writers(self) -> dict[int, set[tuple[str, int]]]:
        """By block: the (request, group) pairs that hold it and have not filled it.

        Others may hold it to read, even in the step that fills it: all keys and values of a step
        are written before any are read.
        """
        writers: dict[int, set[tuple[str, int]]] = {}
        for request_id, held in self._held.items():
            first = held.num_computed_tokens // self._block_size
            for group, table in enumerate(held.tables):
                if self._is_cross[group] and held.num_computed_tokens:
                    continue
                for block_id in table[first:]:
                    writers.setdefault(block_id, set()).add((request_id, group))
        return writers

    def _read_and_sample(self, held: _Held, count: int) -> RequestStepResult:
        start, end = held.num_computed_tokens, held.num_computed_tokens + count
        for group, table in enumerate(held.tables):
            for position in self._visible(held, group, start, end):
                block_id = table[position // self._block_size]
                slot = block_id * self._block_size + position % self._block_size
                found, wanted = self._slots.get(slot), (group, self._value(held, group, position))
                assert found == wanted, (
                    f"{held.new.request_id!r} reads position {position} in block {block_id}: "
                    f"{found} instead of {wanted}"
                )
        held.num_computed_tokens = end
        result = RequestStepResult()
        if held.new.params.prompt_logprobs is not None:
            result.prompt_logprobs = [
                TokenLogprobs([held.token_ids[position]], [0.0], [position])
                for position in range(start + 1, min(end + 1, held.new.num_prompt_tokens))
            ]
        if end == len(held.token_ids):
            result.token_ids = [sampled_token(held.fingerprints[-1], self.vocab_size)]
            held.append(result.token_ids)
        return result

    def _visible(self, held: _Held, group: int, start: int, end: int) -> range:
        """Positions that queries from ``start`` to ``end`` read."""
        if self._is_cross[group]:
            return range(held.new.num_encoder_tokens)
        window = self._windows[group]
        return range(0 if window is None else max(0, start - window + 1), end)
