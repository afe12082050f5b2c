from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace_engine.kv.events import (
    AllBlocksCleared,
    BlockEventLog,
    BlockRemoved,
    BlockStored,
    CachedBlocks,
    Event,
    KVEventBatch,
    decode,
    encode,
)
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_testing.engine.kv_managers import MAX_MODEL_LEN, FakeSequence, advance, cache_config

GOLDEN = bytes.fromhex(
    "93cb3ff80000000000009397ab426c6f636b53746f726564920b0cc0940102030402c0a347505593ac426c6f636b52656d"
    "6f766564910ba347505591b0416c6c426c6f636b73436c656172656400"
)


def test_golden_bytes_of_a_batch() -> None:
    batch = KVEventBatch(
        1.5,
        [BlockStored([11, 12], None, [1, 2, 3, 4], 2, None, "GPU"), BlockRemoved([11], "GPU"),
         AllBlocksCleared()],
        0,
    )  # fmt: skip
    assert encode(batch) == GOLDEN
    assert decode(GOLDEN) == batch
    assert len(set(batch.events)) == 3  # hashable, to be counted


def test_blocks_of_one_sequence_are_one_event() -> None:
    log = BlockEventLog(2)
    log.stored(b"a", None, [1, 2], "")
    log.stored(b"b", b"a", [3, 4], "")
    log.stored(b"c", b"a", [5, 6], "")
    log.removed(b"b")
    log.removed(b"c")
    assert log.take() == [
        BlockStored([b"a", b"b"], None, [1, 2, 3, 4], 2, None, "GPU"),
        BlockStored([b"c"], b"a", [5, 6], 2, None, "GPU"),
        BlockRemoved([b"b", b"c"], "GPU"),
    ]
    assert log.take() == []


def test_a_block_of_two_groups_goes_with_the_last() -> None:
    log = BlockEventLog(1)
    log.stored(b"a", None, [1], "")
    log.stored(b"a", None, [1], "")
    log.removed(b"a")
    assert [type(event) for event in log.take()] == [BlockStored]
    log.removed(b"a")
    assert log.take() == [BlockRemoved([b"a"], "GPU")]


def test_cached_prefix_is_found_by_token_ids() -> None:
    blocks = CachedBlocks()
    blocks.apply(KVEventBatch(0.0, [BlockStored([1, 2], None, [5, 6, 7, 8], 2),
                                    BlockStored([3], None, [5, 6], 2, "tuned")]))  # fmt: skip
    assert blocks.num_cached_tokens([5, 6, 7, 8, 9]) == 4
    assert blocks.num_cached_tokens([5, 6, 7]) == 2
    assert blocks.num_cached_tokens([6, 5, 7, 8]) == 0
    assert blocks.num_cached_tokens([5, 6, 7, 8], "tuned") == 2
    blocks.apply(KVEventBatch(0.0, [BlockRemoved([1])]))
    assert blocks.num_cached_tokens([5, 6, 7, 8]) == 0


class EventsRebuildTheCache(RuleBasedStateMachine):
    """Whatever a manager is asked for, who applies its events knows the blocks that it would find."""

    groups: tuple[str, ...] = ("full",)

    def __init__(self) -> None:
        super().__init__()
        self.log = BlockEventLog(2)
        self.manager = PagedKVCacheManager(
            cache_config(12, *self.groups, block_size=2), True, MAX_MODEL_LEN, events=self.log
        )
        self.mirror = CachedBlocks()
        self.live: dict[str, FakeSequence] = {}
        self.num = 0

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> None:
        self.num += 1
        sequence = FakeSequence(f"r{self.num}", tokens)
        match = self.manager.match_prefix(sequence)
        gained = self.manager.allocate(sequence, len(tokens) - match.num_tokens, match)
        if gained is not None:
            sequence.num_computed_tokens = len(tokens)
            self.live[sequence.request_id] = sequence

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 2))
    def go_on(self, data: st.DataObject, token: int) -> None:
        sequence = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        sequence.all_token_ids.append(token)
        if self.manager.allocate(sequence, 1) is None:
            sequence.all_token_ids.pop()
        else:
            sequence.num_computed_tokens += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.manager.free(name)
        del self.live[name]

    @rule()
    def forget(self) -> None:
        self.manager.forget_prefixes()

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() == (not self.live)

    @invariant()
    def the_mirror_is_the_cache(self) -> None:
        events: list[Event] = self.log.take()
        self.mirror.apply(decode(encode(KVEventBatch(0.0, events))))
        found = {d for pool in self.manager._pools for cached in pool._cached for d in cached}
        assert self.mirror.hashes == found


class EventsOfTwoGroups(EventsRebuildTheCache):
    groups = ("full", "sliding")


class EventsOfStates(EventsRebuildTheCache):
    groups = ("full", "recurrent")


TestOneGroup = EventsRebuildTheCache.TestCase
TestOneGroup.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTwoGroups = EventsOfTwoGroups.TestCase
TestStates = EventsOfStates.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTwoGroups.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12))
def test_the_mirror_finds_what_the_manager_finds(tokens: list[int]) -> None:
    log = BlockEventLog(2)
    manager = PagedKVCacheManager(cache_config(30, block_size=2), True, MAX_MODEL_LEN, events=log)
    advance(manager, FakeSequence("a", [0, 1, 2, 3, 0, 1]), 6)
    mirror = CachedBlocks()
    mirror.apply(KVEventBatch(0.0, log.take()))
    found = manager.match_prefix(FakeSequence("b", [*tokens, 9])).num_tokens
    assert mirror.num_cached_tokens(tokens) == found
