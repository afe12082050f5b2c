"""A worker without a model that checks every step it is given, for tests of schedulers.

Its "keys and values" are fingerprints of the prefix that ends at a token, and the token that it
samples is a function of that fingerprint. So whatever a scheduler does (chunks, prefix hits,
preemptions, reordering), a request must yield :func:`expected_tokens`, and a slot that was not
written, or was overwritten by somebody else, is seen at the first read. So is a state of recurrent
layers that is not the one after the token before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_core.kv import (
    NULL_BLOCK,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    RecurrentSpec,
    SlidingWindowSpec,
)
from headrace_core.multimodal import MediaInput
from headrace_core.step import (
    NewRequest,
    RequestStepResult,
    ScheduledStep,
    StepResult,
    TokenLogprobs,
)

_PRIME = 2**61 - 1


def fingerprint(token_ids: Sequence[int], previous: int = 1) -> int:
    """Fingerprint of a prefix; ``previous`` continues the one that ends before ``token_ids``."""
    for token_id in token_ids:
        previous = (previous * 1_000_003 + token_id + 7) % _PRIME
    return previous


def contents(token_ids: Sequence[int], media: Sequence[MediaInput]) -> list[int]:
    """Input of fingerprints: ids, and for placeholders the part of the item they stand for."""
    found = list(token_ids)
    for item in media:
        digest = int(item.content_hash, 16)
        for index in range(item.num_tokens):
            if 0 <= item.offset + index < len(found):
                found[item.offset + index] = digest + index
    return found


def sampled_token(prefix_fingerprint: int, vocab_size: int) -> int:
    """Token that the checking worker "samples" after a prefix."""
    return (prefix_fingerprint >> 11) % vocab_size


def expected_tokens(
    prompt: Sequence[int],
    count: int,
    vocab_size: int,
    media: Sequence[MediaInput] = (),
    adapter: int = 0,
) -> list[int]:
    """The output of a straight run, without stopping.

    Args:
        adapter: id of the one that computes it; 0: none does.
    """
    state, output = fingerprint(contents(prompt, media), 1 + adapter), list[int]()
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

    @property
    def adapter(self) -> int:
        """Id of its adapter; 0: it has none."""
        lora = self.new.request.lora_request
        return 0 if lora is None else lora.lora_int_id

    def append(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        start = len(self.fingerprints)
        for content in contents(self.token_ids, self.new.request.media)[start:]:
            previous = self.fingerprints[-1] if self.fingerprints else 1 + self.adapter
            self.fingerprints.append(fingerprint((content,), previous))


class CheckingWorker:
    """Executes steps on fingerprints and raises AssertionError at the first broken promise.

    Args:
        config: the cache that the scheduler's manager hands out.
        vocab_size: sampled tokens are below this.
        guesses: (request id, number of its tokens) -> how many are guessed of those that a step has room
            for, and how many of the first are right.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        vocab_size: int = 5,
        guesses: Callable[[str, int], tuple[int, int]] = lambda request_id, count: (0, 0),
    ) -> None:
        self.vocab_size = vocab_size
        self.num_computed = 0
        """Tokens over all steps."""
        self._block_size = config.block_size
        self._specs = [group.spec for group in config.groups]
        self._pools = [group.pool for group in config.groups]
        self._num_blocks = [config.pools[pool] for pool in self._pools]
        self._is_cross = [isinstance(spec, CrossAttentionSpec) for spec in self._specs]
        self._is_state = [isinstance(spec, RecurrentSpec) for spec in self._specs]
        self._guesses = guesses
        self._runs: dict[str, tuple[int, int]] = {}
        """Of the step: right and wrong guesses by request."""
        self._num_encoded = 0
        self._held: dict[str, _Held] = {}
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        """(Pool, slot) -> (group, fingerprint)."""
        self._states: dict[tuple[int, int], tuple[int, int]] = {}
        """(Pool, block) -> (group, fingerprint of all tokens that the state has seen)."""
        self._ahead: list[str] = []
        """Hashes of media to embed beside steps: one is done with each step."""
        self._adapters: dict[int, int] = {}
        """By slot."""
        self._next_step_id = 0
        self._unsure: set[str] = set()
        """Requests that a failed step reported as gone: they may be reported again."""

    def execute(self, step: ScheduledStep) -> StepResult:
        assert step.step_id == self._next_step_id, "steps must be executed in order"
        self._next_step_id += 1
        self._apply(step)
        self._runs = {}
        for request_id, room in step.num_drafts.items():
            self._guess(self._held[request_id], room)
        self._check_adapters(step)
        self._read_states(step)
        self._write_all(step)
        results = {
            request_id: self._read_and_sample(self._held[request_id], count)
            for request_id, count in step.num_scheduled_tokens.items()
        }
        self._ahead += [item.content_hash for item in step.media_ahead]
        done, self._ahead = self._ahead[:1], self._ahead[1:]
        return StepResult(step.step_id, results, embedded=done)

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
        self._place(step)
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

    def _guess(self, held: _Held, room: int) -> None:
        """Let right guesses stand behind the request's tokens."""
        request_id = held.new.request_id
        assert held.num_computed_tokens == len(held.token_ids) - 1, (
            f"{request_id!r} does not decode"
        )
        number, right = self._guesses(request_id, len(held.token_ids))
        number = min(number, room)
        right = min(number, right)
        self._runs[request_id] = right, number - right
        for _ in range(right):
            held.append([sampled_token(held.fingerprints[-1], self.vocab_size)])

    def _place(self, step: ScheduledStep) -> None:
        """Put adapters into slots: nobody here may need what they held."""
        for slot, lora in step.placed_adapters.items():
            before = self._adapters.pop(slot, 0)
            using = [i for i, held in self._held.items() if before and held.adapter == before]
            assert not using, f"{using} lose their adapter {before}"
            # After a failed step the scheduler trusts no slot, and uses another one perhaps.
            others = {s: i for s, i in self._adapters.items() if i != lora.lora_int_id}
            self._adapters = {**others, slot: lora.lora_int_id}

    def _check_adapters(self, step: ScheduledStep) -> None:
        wanted = {self._held[request_id].adapter for request_id in step.num_scheduled_tokens} - {0}
        missing = wanted - set(self._adapters.values())
        assert not missing, f"adapters {missing} are in no slot"

    def _read_states(self, step: ScheduledStep) -> None:
        """States are read and written in any order within a step: before it they must hold what the
        step reads, and nobody else may read or write what one request writes."""
        for group in (g for g, is_state in enumerate(self._is_state) if is_state):
            pool, readers, writers = self._pools[group], set[tuple[int, str]](), dict[int, str]()
            for request_id, count in step.num_scheduled_tokens.items():
                held = self._held[request_id]
                start, table = held.num_computed_tokens, held.tables[group]
                if start:
                    before = table[(start - 1) // self._block_size]
                    found, wanted = self._states.get((pool, before)), held.fingerprints[start - 1]
                    assert found == (group, wanted), (
                        f"{request_id!r} begins from the state in block {before}, which is {found} "
                        f"instead of {wanted}"
                    )
                    readers.add((before, request_id))
                after = table[(start + count - 1) // self._block_size]
                assert NULL_BLOCK < after < self._num_blocks[group]
                assert after not in writers, f"{writers[after]!r} and {request_id!r} write {after}"
                writers[after] = request_id
            mixed = [b for b, reader in readers if writers.get(b, reader) != reader]
            assert not mixed, f"states {mixed} are read and written by different requests"

    def _write_all(self, step: ScheduledStep) -> None:
        writers = self._possible_writers()
        for request_id, count in step.num_scheduled_tokens.items():
            assert count >= 1, f"{request_id!r} runs with {count} tokens"
            held = self._held[request_id]
            right, wrong = self._runs.get(request_id, (0, 0))
            start, end = held.num_computed_tokens, held.num_computed_tokens + count + right
            assert end <= len(held.token_ids), f"{request_id!r}: token {end - 1} does not exist"
            limit = held.new.request.params.max_tokens
            assert limit is None or end + wrong < held.new.num_prompt_tokens + limit, (
                f"{request_id!r} computes its last token, which nobody needs"
            )
            self.num_computed += count
            if start == 0:
                self._num_encoded += 1
                held.encoding = self._num_encoded
            for group, table in enumerate(held.tables):
                pool = self._pools[group]
                if self._is_state[group]:
                    block_id = table[(end - 1) // self._block_size]
                    self._states[pool, block_id] = (group, held.fingerprints[end - 1])
                    continue
                for position in self._written(held, group, end + wrong):
                    block_id = table[position // self._block_size]
                    assert NULL_BLOCK < block_id < self._num_blocks[group]
                    able = writers[pool, block_id]
                    assert able == {(request_id, group)}, (
                        f"block {block_id} can be written by {sorted(able)}"
                    )
                    slot = block_id * self._block_size + position % self._block_size
                    is_wrong = position >= end and not self._is_cross[group]
                    value = -position if is_wrong else self._value(held, group, position)
                    self._slots[pool, slot] = (group, value)

    def _written(self, held: _Held, group: int, end: int) -> range:
        """Positions that a step up to ``end`` writes: encoder states all with the first tokens."""
        start = held.num_computed_tokens
        if not self._is_cross[group]:
            return range(start, end)
        return range(0 if start else held.new.request.num_encoder_tokens)

    def _value(self, held: _Held, group: int, position: int) -> int:
        if not self._is_cross[group]:
            return held.fingerprints[position]
        return fingerprint((held.encoding, position))

    def _possible_writers(self) -> dict[tuple[int, int], set[tuple[str, int]]]:
        """By pool and block: the (request, group) pairs that hold it and have not filled it.

        Others may hold it to read, even in the step that fills it: all keys and values of a step
        are written before any are read.
        """
        writers: dict[tuple[int, int], set[tuple[str, int]]] = {}
        for request_id, held in self._held.items():
            first = held.num_computed_tokens // self._block_size
            for group, table in enumerate(held.tables):
                if self._is_cross[group] and held.num_computed_tokens:
                    continue
                for block_id in table[first:]:
                    place = (self._pools[group], block_id)
                    writers.setdefault(place, set()).add((request_id, group))
        return writers

    def _read_and_sample(self, held: _Held, count: int) -> RequestStepResult:
        right, wrong = self._runs.get(held.new.request_id, (0, 0))
        start, end = held.num_computed_tokens, held.num_computed_tokens + count + right
        for group, table in enumerate(held.tables):
            for position in self._visible(held, group, start, end):
                block_id = table[position // self._block_size]
                slot = block_id * self._block_size + position % self._block_size
                found = self._slots.get((self._pools[group], slot))
                wanted = (group, self._value(held, group, position))
                assert found == wanted, (
                    f"{held.new.request_id!r} reads position {position} in block {block_id}: "
                    f"{found} instead of {wanted}"
                )
        held.num_computed_tokens = end
        result = RequestStepResult()
        if held.new.request.params.prompt_logprobs is not None:
            result.prompt_logprobs = [
                TokenLogprobs([held.token_ids[position]], [0.0], [position])
                for position in range(start + 1, min(end + 1, held.new.num_prompt_tokens))
            ]
        if end == len(held.token_ids):
            sampled = sampled_token(held.fingerprints[-1], self.vocab_size)
            result.token_ids = [*held.token_ids[end - right :], sampled]
            result.num_drafted = right + wrong
            held.append([sampled])
        return result

    def _visible(self, held: _Held, group: int, start: int, end: int) -> range:
        """Positions whose keys and values queries from ``start`` to ``end`` read."""
        spec = self._specs[group]
        if isinstance(spec, CrossAttentionSpec):
            return range(held.new.request.num_encoder_tokens)
        if isinstance(spec, RecurrentSpec):
            return range(0)
        if isinstance(spec, SlidingWindowSpec):
            return range(max(0, start - spec.sliding_window + 1), end)
        if isinstance(spec, ChunkedLocalSpec):
            return range(start - start % spec.attention_chunk_size, end)
        return range(end)


def batched(result: StepResult) -> StepResult:
    """The same result as a worker gives it that has tokens in bulk: requests of which one token is all there
    is to say are among :attr:`StepResult.tokens` only."""
    tokens = {
        request_id: part.token_ids[0]
        for request_id, part in result.requests.items()
        if part == RequestStepResult(part.token_ids[:1]) and part.token_ids
    }
    others = {i: part for i, part in result.requests.items() if i not in tokens}
    return dataclasses.replace(result, requests=others, tokens=tokens)
