"""Requests that are given blocks one after another get what each gets by itself, and leave the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_engine.kv.contract import NextBlocks
from headrace_engine.kv.events import BlockEventLog
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_testing.engine.kv_managers import (
    MAX_MODEL_LEN,
    FakeSequence,
    advance,
    cache_config,
)

BLOCK_SIZE = 2
LONGEST = 30

worlds = st.fixed_dictionaries(
    {
        "groups": st.sampled_from(
            [("full",), ("full",), ("latent",), ("full", "sliding"), ("wide", "full"),
             ("full", "recurrent"), ("chunked",)]
        ),
        "num_blocks": st.integers(6, 40),
        "caching": st.booleans(),
    }
)  # fmt: skip
moves = st.one_of(
    st.tuples(st.just("begin"), st.lists(st.integers(0, 2), min_size=1, max_size=9)),
    st.tuples(st.just("decode"), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
    st.tuples(st.sampled_from(["free", "forget"]), st.integers(0, 9)),
)


class Side:
    """A manager and its requests. ``plain``: it knows the short ways for caches of one group."""

    def __init__(self, world: dict[str, Any], *, plain: bool) -> None:
        config = cache_config(world["num_blocks"] + 1, *world["groups"], block_size=BLOCK_SIZE)
        self.events = BlockEventLog(BLOCK_SIZE)
        self.kv = PagedKVCacheManager(config, world["caching"], MAX_MODEL_LEN, events=self.events)
        self.kv.notes_blocks = True
        self.kv._is_plain &= plain
        self.plain = plain
        self.live: list[FakeSequence] = []
        self.unknown: dict[str, list[int]] = {}
        """Tokens that steps in flight sample, by request."""

    def move(self, name: str, drawn: Any, number: int) -> object:
        """Make a move; what came of it."""
        if name == "begin":
            return self._begin(FakeSequence(f"r{number}", list(drawn)))
        if name == "decode":
            return [self._decode(lag) for lag in drawn]
        if name == "forget":
            return self.kv.forget_prefixes()
        if self.live:
            self._free(drawn % len(self.live))
        return None

    def state(self) -> list[object]:
        """All that others can see."""
        pools = [(pool.free_blocks(), pool.num_free, pool.ref_counts) for pool in self.kv.pools]
        tables = [self.kv.block_ids(sequence.request_id) for sequence in self.live]
        quiet = [self.kv.quiet_until(sequence.request_id) for sequence in self.live]
        return [pools, tables, quiet, self.events.take(), self.kv.filled, self.kv.filling]

    def _begin(self, sequence: FakeSequence) -> object:
        count = len(sequence.all_token_ids) - self.kv.match_prefix(sequence).num_tokens
        gained = advance(self.kv, sequence, count, match=True)
        if gained is None:
            self.kv.free(sequence.request_id)
        else:
            self.live.append(sequence)
            self.unknown[sequence.request_id] = []
        return gained

    def _decode(self, lag: int) -> list[object]:
        """A token for each, the last ``lag`` of which are not known yet."""
        for index in range(len(self.live) - 1, -1, -1):
            sequence = self.live[index]
            tokens = self.unknown[sequence.request_id]
            known = max(0, len(tokens) - lag)
            sequence.all_token_ids += tokens[:known]
            del tokens[:known]
            if sequence.num_computed_tokens >= LONGEST:
                self._free(index)
        found: list[object] = []
        for sequence, (gained, *quiet) in zip(list(self.live), self._allocate_each()):
            found.append(gained)
            if gained is None:  # others give up theirs, and the step ends
                self._free(-1)
                break
            assert tuple(quiet) == self.kv.quiet_until(sequence.request_id)
            self.unknown[sequence.request_id].append(sequence.num_computed_tokens % 3)
            sequence.num_computed_tokens += 1
        return found

    def _allocate_each(self) -> Iterator[NextBlocks]:
        if self.plain:
            return self.kv.allocate_each(list(self.live))
        return super(PagedKVCacheManager, self.kv).allocate_each(list(self.live))

    def _free(self, index: int) -> None:
        sequence = self.live.pop(index)
        self.kv.free(sequence.request_id)


@settings(max_examples=150, deadline=None)
@given(world=worlds, moves=st.lists(moves, min_size=4, max_size=40))
def test_one_after_another_is_one_by_one(
    world: dict[str, Any], moves: list[tuple[str, Any]]
) -> None:
    sides = [Side(world, plain=plain) for plain in (False, True)]
    for number, (name, drawn) in enumerate(moves):
        first, second = (side.move(name, drawn, number) for side in sides)
        assert first == second
        first, second = (side.state() for side in sides)
        assert first == second
    for side in sides:
        while side.live:
            side._free(0)
        assert side.kv.num_free_blocks == side.kv.num_blocks


def test_what_happens_between_two_turns_is_seen() -> None:
    """The first finds no room and is given up: the second has its block, and the third finds none again."""
    config = cache_config(4, "full", block_size=BLOCK_SIZE)
    manager = PagedKVCacheManager(config, False, MAX_MODEL_LEN)
    sequences = [FakeSequence(name, [1, 2]) for name in "abc"]
    for sequence in sequences:
        advance(manager, sequence, 2)
    turns = manager.allocate_each(sequences)
    assert next(turns)[0] is None
    manager.free("a")
    assert next(turns)[0] == ([1],)
    assert next(turns)[0] is None


def test_a_request_that_raises_has_its_turn_alone() -> None:
    manager = PagedKVCacheManager(cache_config(20, "full", block_size=1), True, MAX_MODEL_LEN)
    good, bad = FakeSequence("good", [1, 2]), FakeSequence("bad", [3, 4])
    for sequence in (good, bad):
        advance(manager, sequence, 2)
    good.all_token_ids.append(5)
    bad.all_token_ids.append(-1)  # no token that can be hashed
    turns = manager.allocate_each([good, bad])
    assert next(turns)[0] == ([5],)
    with pytest.raises(Exception, match=r"argument|format"):
        next(turns)
