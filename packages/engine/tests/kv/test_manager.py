from __future__ import annotations

import pytest

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    NULL_BLOCK,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from headrace_engine.kv.contract import KVCacheManager
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_testing.engine.kv_managers import (
    MAX_MODEL_LEN,
    FakeSequence,
    KVCacheManagerConformance,
    advance,
    cache_config,
    run_whole,
)


def make_manager(num_blocks: int, *groups: str, block_size: int = 2) -> PagedKVCacheManager:
    config = cache_config(num_blocks, *groups, block_size=block_size)
    return PagedKVCacheManager(config, True, MAX_MODEL_LEN)


class TestPagedKVCacheManager(KVCacheManagerConformance):
    def make(self, config: KVCacheConfig, enable_prefix_caching: bool = True) -> KVCacheManager:
        return PagedKVCacheManager(config, enable_prefix_caching, MAX_MODEL_LEN)


def test_exact_ids_of_a_hit_with_a_partial_block() -> None:
    manager = make_manager(8)
    one = FakeSequence("a", [1, 2, 3, 4, 5])
    assert advance(manager, one, 5, match=True) == ([1, 2, 3],)
    two = FakeSequence("b", [1, 2, 3, 4, 9])
    assert advance(manager, two, 1, match=True) == ([1, 2, 4],)
    manager.free("a")  # block 3 was partial, so it is empty and comes first
    three = FakeSequence("c", [7, 7, 7])
    assert advance(manager, three, 3, match=True) == ([3, 5],)


def test_a_duplicate_is_not_merged_and_takes_over_when_the_first_is_evicted() -> None:
    manager = make_manager(4)
    one, two = FakeSequence("a", [1, 2, 3]), FakeSequence("b", [1, 2])
    advance(manager, one, 2)
    advance(manager, two, 2, match=True)  # at least one token is computed: no hit, own block
    assert (one.table, two.table) == ([[1]], [[2]])
    manager.free("a")
    advance(manager, FakeSequence("c", [8, 8, 9, 9]), 4)  # takes block 3, then evicts block 1
    assert manager.match_prefix(FakeSequence("d", [1, 2, 3])).num_tokens == 0
    manager.free("b")
    assert manager.match_prefix(FakeSequence("e", [1, 2, 3])) == (2, ([2],))


def test_duplicates_do_not_displace_other_content() -> None:
    manager = make_manager(4)
    run_whole(manager, "x", [5, 5])  # cached in block 1
    one, two = FakeSequence("a", [1, 2]), FakeSequence("b", [1, 2])
    advance(manager, one, 2)
    advance(manager, two, 2)
    manager.free("a")
    manager.free("b")
    advance(manager, FakeSequence("c", [9]), 1)
    assert manager.match_prefix(FakeSequence("d", [5, 5, 5])).num_tokens == 2
    assert manager.match_prefix(FakeSequence("e", [1, 2, 5])).num_tokens == 2


def test_a_hit_shrinks_until_all_groups_agree() -> None:
    """Two windows: the shorter hit of one lies where the other's blocks are gone."""

    def group(name: str, window: int) -> KVCacheGroup:
        return KVCacheGroup((name,), SlidingWindowSpec(2, 1, 1, "float32", sliding_window=window))

    full = KVCacheGroup(("full",), FullAttentionSpec(2, 1, 1, "float32"))
    config = KVCacheConfig((40,), (full, group("narrow", 3), group("wide", 7)))
    manager = PagedKVCacheManager(config, True, MAX_MODEL_LEN)
    tokens = list(range(13))
    run_whole(manager, "a", tokens)
    pool, digests = manager._pools[0], manager._digests(FakeSequence("x", tokens))

    def evict(group: int, index: int) -> None:
        block_id = pool.lookup(group, digests[index])
        assert block_id is not None
        pool._forget(block_id)

    assert manager.match_prefix(FakeSequence("p", tokens)).num_tokens == 12
    evict(2, 5)  # wide: 10 tokens at most
    assert manager.match_prefix(FakeSequence("p", tokens)).num_tokens == 10
    evict(1, 4)  # narrow needs block 4 for 10 tokens: 8
    assert manager.match_prefix(FakeSequence("p", tokens)).num_tokens == 8
    evict(2, 1)  # wide needs blocks 1..3 for 8 tokens and 0..2 for 6: 2
    match = manager.match_prefix(FakeSequence("p", tokens))
    assert match.num_tokens == 2
    assert [len(block_ids) for block_ids in match.block_ids] == [1, 1, 1]


def test_a_hole_in_the_last_window_shortens_the_hit() -> None:
    spec = SlidingWindowSpec(4, 1, 1, "float32", sliding_window=6)
    config = KVCacheConfig((40,), (KVCacheGroup(("l",), spec),))
    manager = PagedKVCacheManager(config, True, MAX_MODEL_LEN)
    tokens = list(range(21))
    first = run_whole(manager, "a", tokens)
    digests = manager._digests(FakeSequence("x", tokens))
    for hole, (num_tokens, num_null) in {3: (12, 1), 1: (4, 0), 0: (0, 0)}.items():
        manager._pools[0]._forget(manager._pools[0].found(0, digests[hole]))
        match = manager.match_prefix(FakeSequence("p", tokens))
        visible = first.table[0][num_null : num_tokens // 4]
        assert match == (num_tokens, ([NULL_BLOCK] * num_null + visible,))


def test_a_window_of_one_needs_no_cached_block() -> None:
    spec = SlidingWindowSpec(2, 1, 1, "float32", sliding_window=1)
    manager = PagedKVCacheManager(
        KVCacheConfig((9,), (KVCacheGroup(("l",), spec),)), True, MAX_MODEL_LEN
    )
    assert manager.match_prefix(FakeSequence("a", list(range(7)))) == (6, ([NULL_BLOCK] * 3,))


def test_fits_counts_what_a_sliding_group_holds_at_once() -> None:
    config = cache_config(9, "sliding", block_size=2)  # window 6
    assert not PagedKVCacheManager(config, True, 64).fits(17)
    bounded = PagedKVCacheManager(config, True, 64, max_num_batched_tokens=8)
    assert bounded.fits(64)  # ceil((5 + 8) / 2) + 1 = 8 blocks
    assert not PagedKVCacheManager(config, True, 64, max_num_batched_tokens=10).fits(64)
    assert not bounded.fits(65)


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("first", range(1, 9))
def test_what_fits_runs(first: int, step: int) -> None:
    config = cache_config(9, "sliding", block_size=2)
    manager = PagedKVCacheManager(config, True, 64, max_num_batched_tokens=8)
    sequence = FakeSequence("a", list(range(64)))
    assert advance(manager, sequence, first, match=True) is not None
    while sequence.num_computed_tokens < 64:
        rest = 64 - sequence.num_computed_tokens
        assert advance(manager, sequence, min(step, rest)) is not None


def test_hashes_of_finished_and_forgotten_requests_are_dropped() -> None:
    manager = make_manager(8)
    manager.match_prefix(FakeSequence("waiting", [1, 2, 3]))
    run_whole(manager, "a", [1, 2, 3])
    manager.free("waiting")
    assert not manager._hashes
    assert not manager._entries


def test_a_match_is_only_for_the_first_allocation() -> None:
    manager = make_manager(8)
    sequence = FakeSequence("a", [1, 2, 3])
    match = manager.match_prefix(sequence)
    manager.allocate(sequence, 2, match)
    with pytest.raises(ValueError, match="match must be None"):
        manager.allocate(sequence, 1, match)
    with pytest.raises(ValueError, match="num_new_tokens = 0"):
        manager.allocate(sequence, 0)


class UnknownSpec(KVCacheSpec):
    pass


@pytest.mark.parametrize(
    ("num_blocks", "specs", "message"),
    [
        (8, [], "no layer groups"),
        (1, [FullAttentionSpec(2, 1, 1, "int8")], r"pools\[0\] = 1 blocks: must be at least 2"),
        (8, [UnknownSpec(2, 1, 1, "int8")], "UnknownSpec of layer 'l0' is not supported"),
        (8, [SlidingWindowSpec(2, 1, 1, "int8")], "sliding_window = 0"),
        (8, [ChunkedLocalSpec(2, 1, 1, "int8")], "attention_chunk_size = 0"),
        (8, [CrossAttentionSpec(2, 1, 1, "int8")], "max_encoder_tokens = 0"),
        (
            8,
            [FullAttentionSpec(2, 1, 1, "int8"), FullAttentionSpec(4, 1, 1, "int8")],
            "sizes 2 and 4 differ",
        ),
    ],
)
def test_configs_that_cannot_be_served(
    num_blocks: int, specs: list[KVCacheSpec], message: str
) -> None:
    groups = tuple(KVCacheGroup((f"l{i}",), spec) for i, spec in enumerate(specs))
    with pytest.raises(ConfigError, match=message):
        PagedKVCacheManager(KVCacheConfig((num_blocks,), groups), True, 64)


def test_encoder_states_forbid_shared_prefixes() -> None:
    config = cache_config(9, "full", "cross")
    with pytest.raises(ConfigError, match="enable_prefix_caching = True: must be False for enc"):
        PagedKVCacheManager(config, True, 64)
    with pytest.raises(ConfigError, match="cross-attention only"):
        PagedKVCacheManager(cache_config(9, "cross"), False, 64)


def test_a_request_with_encoder_states_decodes_without_asking() -> None:
    """The quick way of a decoding step is open although the cross group never grows."""
    manager = PagedKVCacheManager(cache_config(20, "full", "cross", block_size=4), False, 64)
    sequence = FakeSequence("a", list(range(9)), num_encoder_tokens=10)
    advance(manager, sequence, 5, match=True)
    nothing = manager._nothing
    assert [advance(manager, sequence, 1) is nothing for _ in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("most_behind", [0, 4])
def test_windows_keep_what_states_may_be_behind(most_behind: int) -> None:
    config = cache_config(40, "sliding", "recurrent", block_size=2)
    manager = PagedKVCacheManager(config, False, MAX_MODEL_LEN, most_behind=most_behind)
    one = FakeSequence("a", list(range(30)))
    advance(manager, one, 20)
    advance(manager, one, 1)
    free = manager.num_free_blocks
    whole = PagedKVCacheManager(config, False, MAX_MODEL_LEN).num_free_blocks
    # The query at 20 sees six tokens from 15 on: blocks 7 to 10, and two more for one at 16.
    assert whole - free == 1 + 4 + most_behind // 2


def test_states_left_beside_guesses_are_not_kept() -> None:
    config = cache_config(40, "full", "recurrent", block_size=2)
    for most_behind, kept in ((0, 4), (4, 2)):
        manager = PagedKVCacheManager(config, True, MAX_MODEL_LEN, most_behind=most_behind)
        one = FakeSequence("a", [1, 2])
        advance(manager, one, 2, match=True)
        for token in (3, 4, 5):
            one.all_token_ids.append(token)
            advance(manager, one, 1)
        manager.free("a")
        assert manager.match_prefix(FakeSequence("b", [1, 2, 3, 4, 5, 6])).num_tokens == kept
