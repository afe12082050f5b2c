"""Conformance suite of KV-cache managers, and a sequence to drive one with.

A manager's tests are one class::

    class TestMine(KVCacheManagerConformance):
        def make(self, config, enable_prefix_caching=True):
            return MyManager(config, enable_prefix_caching, max_model_len=64)

Block ids are never compared with constants here: which free and empty block is taken is the
manager's business; which cached one is evicted, and what a table must look like, is not.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace_core.kv import (
    NULL_BLOCK,
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLASpec,
    RecurrentSpec,
    SlidingWindowSpec,
    StateShape,
)
from headrace_core.multimodal import MediaInput
from headrace_core.request import PromptEmbeds

Manager = Any
"""A ``headrace_engine.kv.contract.KVCacheManager``, or what behaves as one."""
BLOCK_SIZE = 4
WINDOW = 6
"""Window of the sliding-window group: a query sees itself and the five tokens before it."""
CHUNK = 10
"""Chunk of the chunked group; no multiple of the block size."""
MAX_ENCODER_LEN = 20
"""Most encoder states of a request, for groups of cross-attention layers."""
MAX_MODEL_LEN = 64
"""A manager under test must accept sequences of this length."""


@dataclass
class FakeSequence:
    """A :class:`~headrace_engine.kv.contract.CachedSequence` whose fields are set by the test."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    cache_salt: str | None = None
    prompt_embeds: PromptEmbeds | None = None
    skip_reading_prefix_cache: bool = False
    media: list[MediaInput] = field(default_factory=list)
    num_encoder_tokens: int = 0
    adapter_digest: str = ""
    table: list[list[int]] = field(default_factory=list)
    """By group: what the manager said was gained, in order."""
    num_drafts: int = 0

    @property
    def num_settled_tokens(self) -> int:
        return self.num_computed_tokens - self.num_drafts


OWN_POOL = ("wide", "latent", "recurrent")
"""Groups of :func:`cache_config` whose pages are unlike the others'."""


def cache_config(
    num_blocks: int | Mapping[str, int], *groups: str, block_size: int = BLOCK_SIZE
) -> KVCacheConfig:
    """A cache with one layer in each group.

    Args:
        num_blocks: of each pool, the null block included; or by the kind of the pool's first group.
        groups: each full, sliding, chunked, cross, latent, recurrent or wide (full, of larger pages).
            Those of :data:`OWN_POOL` have a pool for each kind, the others share one.
    """
    specs: dict[str, CacheSpec] = {
        "full": FullAttentionSpec(block_size, 1, 1, "float32"),
        "wide": FullAttentionSpec(block_size, 1, 2, "float32"),
        "sliding": SlidingWindowSpec(block_size, 1, 1, "float32", sliding_window=WINDOW),
        "chunked": ChunkedLocalSpec(block_size, 1, 1, "float32", attention_chunk_size=CHUNK),
        "latent": MLASpec(block_size, 1, 3, "float32"),
        "recurrent": RecurrentSpec(block_size, (StateShape((3,), "float32"),)),
        "cross": CrossAttentionSpec(
            block_size, 1, 1, "float32", max_encoder_tokens=MAX_ENCODER_LEN
        ),
    }
    pools: dict[str, str] = {}
    """Kind of the first group, by what the groups of a pool have in common."""
    made = []
    for index, kind in enumerate(groups or ("full",)):
        common = kind if kind in OWN_POOL else ""
        pools.setdefault(common, kind)
        pool = list(pools).index(common)
        made.append(KVCacheGroup((f"layer{index}",), specs[kind], pool))
    counts = [num_blocks if isinstance(num_blocks, int) else num_blocks[k] for k in pools.values()]
    return KVCacheConfig(tuple(counts), tuple(made))


def advance(
    manager: Manager, sequence: FakeSequence, num_tokens: int, *, match: bool = False
) -> tuple[list[int], ...] | None:
    """Allocate and, if that succeeds, count the tokens as computed, as a scheduler does."""
    found = manager.match_prefix(sequence) if match else None
    gained: tuple[list[int], ...] | None = manager.allocate(sequence, num_tokens, found)
    if gained is not None:
        sequence.num_computed_tokens += num_tokens + (found.num_tokens if found else 0)
        sequence.table = sequence.table or [[] for _ in gained]
        for table, new in zip(sequence.table, gained):
            table.extend(new)
    return gained


def run_whole(manager: Manager, request_id: str, token_ids: list[int]) -> FakeSequence:
    """Compute a whole sequence (from its cached prefix on) and free it."""
    sequence = FakeSequence(request_id, token_ids)
    found = manager.match_prefix(sequence)
    advanced = advance(manager, sequence, len(token_ids) - found.num_tokens, match=True)
    assert advanced is not None
    manager.free(request_id)
    return sequence


class KVCacheManagerConformance(ABC):
    """Inherit, and say how to make the manager."""

    @abstractmethod
    def make(self, config: KVCacheConfig, enable_prefix_caching: bool = True) -> Manager:
        """A manager for sequences of up to ``MAX_MODEL_LEN`` tokens."""

    def hit(self, manager: Manager, token_ids: list[int], salt: str | None = None) -> int:
        """Length of the cached prefix of these tokens."""
        sequence = FakeSequence("probe", token_ids, cache_salt=salt)
        num_tokens: int = manager.match_prefix(sequence).num_tokens
        manager.free("probe")
        return num_tokens

    # -- handing out ---------------------------------------------------------------------------

    def test_the_null_block_is_never_handed_out(self) -> None:
        manager = self.make(cache_config(5))
        assert manager.num_blocks == manager.num_free_blocks == 4
        gained = advance(manager, FakeSequence("a", list(range(16))), 16)
        assert gained is not None
        assert sorted(gained[0]) == [1, 2, 3, 4]

    def test_blocks_are_taken_as_tokens_need_them(self) -> None:
        manager = self.make(cache_config(10))
        sequence = FakeSequence("a", list(range(20)))
        gained = [advance(manager, sequence, n) for n in (3, 1, 1, 8)]
        assert [len(g[0]) for g in gained if g is not None] == [1, 0, 1, 2]
        assert manager.block_ids("a") == tuple(sequence.table)
        assert manager.num_free_blocks == 9 - 4

    def test_tables_are_append_only_and_disjoint(self) -> None:
        manager = self.make(cache_config(12))
        one, two = FakeSequence("a", list(range(16))), FakeSequence("b", list(range(50, 66)))
        for _ in range(5):
            before = manager.block_ids("a")[0] if one.num_computed_tokens else []
            assert advance(manager, one, 3) is not None
            assert advance(manager, two, 3) is not None
            assert manager.block_ids("a")[0][: len(before)] == before
        assert not set(one.table[0]) & set(two.table[0])

    @pytest.mark.parametrize("groups", [("full",), ("full", "sliding")])
    def test_a_failed_allocation_changes_nothing(self, groups: tuple[str, ...]) -> None:
        manager = self.make(cache_config(1 + 3 * len(groups), *groups))
        first = FakeSequence("a", list(range(8)))
        assert advance(manager, first, 8) is not None
        table, free = manager.block_ids("a"), manager.num_free_blocks
        assert advance(manager, FakeSequence("b", list(range(50, 60))), 5, match=True) is None
        assert advance(manager, first, 9) is None
        assert (manager.block_ids("a"), manager.num_free_blocks) == (table, free)
        manager.free("b")
        assert self.hit(manager, list(range(9))) == 8

    def test_freeing_returns_every_block_and_ignores_unknown_ids(self) -> None:
        manager = self.make(cache_config(9, "full", "sliding"))
        assert advance(manager, FakeSequence("a", list(range(13))), 13) is not None
        manager.free("a")
        manager.free("a")
        manager.free("never seen")
        assert manager.num_free_blocks == manager.num_blocks == 8

    def test_fits_is_what_an_empty_pool_can_hold(self) -> None:
        manager = self.make(cache_config(4))
        assert manager.fits(12)
        assert not manager.fits(13)
        advance(manager, FakeSequence("a", list(range(12))), 12)
        assert manager.fits(12)

    # -- prefix cache --------------------------------------------------------------------------

    def test_nothing_matches_while_prefix_caching_is_off(self) -> None:
        manager = self.make(cache_config(9), enable_prefix_caching=False)
        run_whole(manager, "a", list(range(12)))
        assert self.hit(manager, list(range(12))) == 0

    @pytest.mark.parametrize(
        ("token_ids", "expected"),
        [
            (list(range(12)), 8),  # all cached: at least one token must be computed
            (list(range(13)), 12),
            (list(range(7)), 4),
            ([*range(8), 99, 9, 10, 11, 12], 8),
            ([*range(5), 99, *range(6, 13)], 4),
            ([99, *range(1, 13)], 0),
            (list(range(4, 13)), 0),  # same blocks, other parent
            ([0], 0),
        ],
    )
    def test_the_longest_cached_prefix_is_found(self, token_ids: list[int], expected: int) -> None:
        manager = self.make(cache_config(9))
        run_whole(manager, "a", list(range(12)))
        assert self.hit(manager, token_ids) == expected

    def test_a_match_names_the_blocks_and_holds_no_reference(self) -> None:
        manager = self.make(cache_config(9))
        first = run_whole(manager, "a", list(range(12)))
        second = FakeSequence("b", [*range(8), 50, 51])
        match = manager.match_prefix(second)
        assert match == (8, (first.table[0][:2],))
        assert manager.num_free_blocks == 8
        gained = manager.allocate(second, 2, match)
        assert gained is not None
        assert gained[0][:2] == first.table[0][:2]
        assert manager.num_free_blocks == 8 - 3

    def test_full_blocks_are_found_while_their_owner_runs(self) -> None:
        manager = self.make(cache_config(9))
        assert advance(manager, FakeSequence("a", list(range(10))), 6) is not None
        assert self.hit(manager, list(range(10))) == 4

    def test_shared_blocks_outlive_their_first_owner(self) -> None:
        manager = self.make(cache_config(9))
        one = FakeSequence("a", list(range(8)))
        two = FakeSequence("b", [*range(8), 50])
        advance(manager, one, 8)
        advance(manager, two, 1, match=True)
        manager.free("a")
        three = FakeSequence("c", list(range(100, 120)))
        assert advance(manager, three, 20) is not None
        assert not set(three.table[0]) & set(two.table[0])

    def test_salts_separate(self) -> None:
        manager = self.make(cache_config(20))
        for salt in (None, "one", "two", ""):
            assert self.hit(manager, list(range(9)), salt) == 0
            sequence = FakeSequence(f"a{salt}", list(range(9)), cache_salt=salt)
            advance(manager, sequence, 9)
            manager.free(sequence.request_id)
            assert self.hit(manager, list(range(9)), salt) == 8

    def test_a_sequence_may_refuse_to_read(self) -> None:
        manager = self.make(cache_config(9))
        run_whole(manager, "a", list(range(9)))
        sequence = FakeSequence("b", list(range(9)), skip_reading_prefix_cache=True)
        assert manager.match_prefix(sequence).num_tokens == 0
        advance(manager, sequence, 9, match=True)
        assert manager.take_stats() == (9, 0)  # only "a" was looked up

    def test_only_known_tokens_are_cached(self) -> None:
        manager = self.make(cache_config(9))
        sequence = FakeSequence("a", [0, 1, 2])
        advance(manager, sequence, 3)
        advance(manager, sequence, 1)  # token 3 is not known yet
        assert self.hit(manager, list(range(9))) == 0
        sequence.all_token_ids.append(3)
        advance(manager, sequence, 1)
        assert self.hit(manager, list(range(9))) == 4

    def test_what_is_known_at_the_end_is_cached(self) -> None:
        manager = self.make(cache_config(9))
        sequence = FakeSequence("a", list(range(6)))
        advance(manager, sequence, 6)
        advance(manager, sequence, 2)
        sequence.all_token_ids += [6, 7]
        manager.free("a")
        assert self.hit(manager, list(range(9))) == 8

    def test_what_is_not_computed_is_not_cached(self) -> None:
        manager = self.make(cache_config(9))
        sequence = FakeSequence("a", list(range(9)))
        advance(manager, sequence, 7)
        manager.free("a")
        assert self.hit(manager, list(range(9))) == 4

    def test_empty_blocks_are_used_before_cached_ones(self) -> None:
        manager = self.make(cache_config(5))
        run_whole(manager, "a", list(range(8)))
        advance(manager, FakeSequence("b", list(range(50, 58))), 8)
        assert self.hit(manager, list(range(9))) == 8

    def test_the_least_recently_used_is_evicted_tail_first(self) -> None:
        manager = self.make(cache_config(7))
        old, new = list(range(12)), list(range(50, 62))
        run_whole(manager, "a", old)
        run_whole(manager, "b", new)
        advance(manager, FakeSequence("c", [90]), 1)
        assert (self.hit(manager, [*old, 1]), self.hit(manager, [*new, 1])) == (8, 12)
        run_whole(manager, "d", [*old[:8], 1])  # its first two blocks are now the latest
        advance(manager, FakeSequence("e", list(range(70, 82))), 12)
        assert (self.hit(manager, [*old, 1]), self.hit(manager, [*new, 1])) == (8, 0)

    def test_matched_blocks_count_as_needed(self) -> None:
        manager = self.make(cache_config(4))
        run_whole(manager, "a", list(range(12)))
        sequence = FakeSequence("b", [*range(8), *range(50, 56)])
        match = manager.match_prefix(sequence)
        assert match.num_tokens == 8
        assert manager.allocate(sequence, 6, match) is None  # two matched and two new, of three
        assert manager.allocate(sequence, 4, match) is not None

    def test_reset_forgets_everything_unless_blocks_are_in_use(self) -> None:
        manager = self.make(cache_config(9))
        advance(manager, FakeSequence("a", list(range(9))), 9)
        assert not manager.reset_prefix_cache()
        assert self.hit(manager, list(range(9))) == 8
        manager.free("a")
        assert manager.reset_prefix_cache()
        assert self.hit(manager, list(range(9))) == 0
        assert manager.num_free_blocks == 8

    @pytest.mark.parametrize(
        "groups", [("full",), ("sliding", "full"), ("recurrent",), ("recurrent", "full")]
    )
    def test_forgotten_prefixes_are_never_found(self, groups: tuple[str, ...]) -> None:
        """Nor are the blocks that whoever runs adds to those which it held then."""
        manager, tokens = self.make(cache_config(60, *groups)), list(range(33))

        def compute(name: str) -> None:
            """In two steps: a state is kept where a step ends at a boundary."""
            sequence = FakeSequence(name, tokens)
            advance(manager, sequence, 32)
            advance(manager, sequence, 1)
            manager.free(name)

        compute("gone")
        assert self.hit(manager, tokens) == 32
        runs = FakeSequence("runs", tokens)
        advance(manager, runs, 12)
        held = manager.num_blocks - manager.num_free_blocks
        manager.forget_prefixes()
        assert manager.num_blocks - manager.num_free_blocks == held > 0
        assert self.hit(manager, tokens) == 0
        while runs.num_computed_tokens < len(tokens):
            advance(manager, runs, 1)
            assert self.hit(manager, tokens) == 0
        manager.free("runs")
        assert self.hit(manager, tokens) == 0
        assert manager.num_free_blocks == manager.num_blocks
        compute("again")
        assert self.hit(manager, tokens) == 32

    def test_statistics_count_admitted_look_ups(self) -> None:
        manager = self.make(cache_config(9))
        run_whole(manager, "a", list(range(12)))
        self.hit(manager, list(range(12)))  # a look-up that leads to nothing does not count
        run_whole(manager, "b", list(range(13)))
        assert manager.take_stats() == (12 + 13, 12)
        assert manager.take_stats() == (0, 0)

    # -- sliding windows -----------------------------------------------------------------------

    def test_blocks_behind_the_window_become_null(self) -> None:
        manager = self.make(cache_config(9, "sliding"))
        sequence = FakeSequence("a", list(range(40)))
        for computed, num_null in [(8, 0), (9, 1), (12, 1), (13, 2)]:
            advance(manager, sequence, computed - sequence.num_computed_tokens)
            advance(manager, sequence, 1)
            sequence.num_computed_tokens -= 1  # the same position again: only the look matters
            table = manager.block_ids("a")[0]
            assert [b == NULL_BLOCK for b in table] == [i < num_null for i in range(len(table))]
            held = len(table) - num_null
            assert manager.num_free_blocks == 8 - held

    def test_blocks_that_a_wrong_guess_leads_back_to_are_kept(self) -> None:
        manager = self.make(cache_config(9, "sliding"))
        sequence = FakeSequence("a", list(range(40)))
        advance(manager, sequence, 13)
        sequence.num_drafts = 4  # in flight: the next query may be the one at 9
        advance(manager, sequence, 1)
        assert [b == NULL_BLOCK for b in manager.block_ids("a")[0]] == [True, False, False, False]
        sequence.num_drafts = 0
        advance(manager, sequence, 3)
        assert [b == NULL_BLOCK for b in manager.block_ids("a")[0]][:2] == [True, True]

    def test_more_may_be_asked_for_in_the_same_step(self) -> None:
        manager = self.make(cache_config(30, "full", "sliding"))
        sequence = FakeSequence("a", list(range(40)))
        advance(manager, sequence, 12)
        first = manager.allocate(sequence, 4)
        again = manager.allocate(sequence, 11)  # the same four and seven more
        assert [len(ids) for gained in (first, again) if gained for ids in gained] == [1, 1, 2, 2]
        # The query at 12 sees keys from 7 on.
        table = manager.block_ids("a")[1]
        assert [b == NULL_BLOCK for b in table] == [True] + [False] * 5

    def test_a_sliding_group_runs_longer_than_its_pool(self) -> None:
        manager = self.make(cache_config(5, "sliding"))
        sequence = FakeSequence("a", list(range(60)))
        for _ in range(30):
            assert advance(manager, sequence, 2) is not None
        manager.free("a")
        assert manager.num_free_blocks == 4

    def test_a_sliding_hit_needs_only_the_last_window(self) -> None:
        manager = self.make(cache_config(6, "sliding"))
        sequence = FakeSequence("a", list(range(16)))
        for _ in range(4):
            advance(manager, sequence, 4)
        manager.free("a")
        advance(manager, FakeSequence("b", [90, 91, 92, 93, 94]), 5)  # takes the empty ones
        probe = FakeSequence("c", list(range(17)))
        num_tokens, (block_ids,) = manager.match_prefix(probe)
        assert num_tokens == 16
        # A query at 16 sees keys from 11 on: blocks 2 and 3.
        assert block_ids == [NULL_BLOCK, NULL_BLOCK, *sequence.table[0][2:]]

    def test_the_hit_is_common_to_all_groups(self) -> None:
        manager = self.make(cache_config(12, "full", "sliding"))
        sequence = FakeSequence("a", list(range(16)))
        for _ in range(4):
            advance(manager, sequence, 4)
        manager.free("a")
        match = manager.match_prefix(FakeSequence("b", list(range(17))))
        assert match.num_tokens == 16
        assert match.block_ids[0] == sequence.table[0]
        assert match.block_ids[1] == [NULL_BLOCK, NULL_BLOCK, *sequence.table[1][2:]]

    # -- encoder states ------------------------------------------------------------------------

    @pytest.mark.parametrize("groups", [("full", "cross"), ("cross", "full"), ("sliding", "cross")])
    def test_encoder_states_take_their_blocks_once(self, groups: tuple[str, ...]) -> None:
        manager = self.make(cache_config(30, *groups), enable_prefix_caching=False)
        sequence = FakeSequence("a", list(range(40)), num_encoder_tokens=9)
        growing, cross = groups.index("cross") ^ 1, groups.index("cross")
        gained = [advance(manager, sequence, n, match=not i) for i, n in enumerate((3, 2, 6))]
        assert [[len(ids) for ids in found or ()] for found in gained] == [
            [1, 3] if cross else [3, 1], [1, 0] if cross else [0, 1], [1, 0] if cross else [0, 1]
        ]  # fmt: skip
        tables = manager.block_ids("a")
        assert (len(tables[growing]), len(tables[cross])) == (3, 3)
        assert not set(tables[growing]) & set(tables[cross])
        manager.free("a")
        assert manager.num_free_blocks == manager.num_blocks == 29

    def test_encoder_states_that_do_not_fit_change_nothing(self) -> None:
        manager = self.make(cache_config(6, "full", "cross"), enable_prefix_caching=False)
        sequence = FakeSequence("a", [0], num_encoder_tokens=17)
        assert advance(manager, sequence, 1, match=True) is None
        assert manager.num_free_blocks == 5
        sequence.num_encoder_tokens = 16
        assert advance(manager, sequence, 1, match=True) is not None
        assert manager.num_free_blocks == 0

    def test_fits_counts_encoder_states(self) -> None:
        manager = self.make(cache_config(6, "full", "cross"), enable_prefix_caching=False)
        assert manager.fits(4, 16)
        assert not manager.fits(4, 17)
        assert not manager.fits(5, 16)
        assert manager.fits(20)

    def test_equal_encoder_states_are_not_shared(self) -> None:
        manager = self.make(cache_config(30, "full", "cross"), enable_prefix_caching=False)
        tables = []
        for name in "ab":
            sequence = FakeSequence(name, list(range(8)), num_encoder_tokens=8)
            advance(manager, sequence, 8, match=True)
            tables.append(manager.block_ids(name))
        assert not {*tables[0][0], *tables[0][1]} & {*tables[1][0], *tables[1][1]}

    # -- chunks --------------------------------------------------------------------------------

    def test_blocks_before_the_chunk_become_null(self) -> None:
        manager = self.make(cache_config(9, "chunked"))
        sequence = FakeSequence("a", list(range(40)))
        for computed, num_null in [(7, 0), (9, 0), (10, 2), (19, 2), (20, 5), (29, 5), (30, 7)]:
            advance(manager, sequence, computed - sequence.num_computed_tokens)
            advance(manager, sequence, 1)
            sequence.num_computed_tokens -= 1
            table = manager.block_ids("a")[0]
            assert [b == NULL_BLOCK for b in table] == [i < num_null for i in range(len(table))]
            assert manager.num_free_blocks == 8 - (len(table) - num_null)

    def test_a_chunked_hit_needs_the_next_tokens_chunk(self) -> None:
        manager = self.make(cache_config(9, "chunked"))
        sequence = FakeSequence("a", list(range(24)))
        for _ in range(6):
            advance(manager, sequence, 4)
        manager.free("a")
        # Tokens 20 to 29 are one chunk: the query at 24 sees keys from 20 on, which block 5 begins.
        found = manager.match_prefix(FakeSequence("b", list(range(25))))
        assert found == (24, ([NULL_BLOCK] * 5 + sequence.table[0][5:],))
        found = manager.match_prefix(FakeSequence("c", list(range(17))))
        assert found == (16, ([NULL_BLOCK] * 2 + sequence.table[0][2:4],))

    # -- states --------------------------------------------------------------------------------

    def test_a_state_moves_along_in_its_block(self) -> None:
        manager = self.make(cache_config(4, "recurrent"), enable_prefix_caching=False)
        sequence = FakeSequence("a", list(range(40)))
        gained = [advance(manager, sequence, count) for count in (6, 2, 1, 11, 1)]
        block_id = next(b for b in sequence.table[0] if b != NULL_BLOCK)
        null, own = [NULL_BLOCK], [block_id]
        assert gained == [(null + own,), ([],), (own,), (null + own,), (own,)]
        assert manager.block_ids("a") == (null * 5 + own,)
        assert manager.num_free_blocks == 2
        manager.free("a")
        assert manager.num_free_blocks == 3

    def test_a_step_that_holds_more_of_a_request_writes_one_state(self) -> None:
        manager = self.make(cache_config(4, "recurrent"))
        sequence = FakeSequence("a", list(range(40)))
        advance(manager, sequence, 6)
        for num_tokens in (2, 6, 11):  # of the same step
            assert manager.allocate(sequence, num_tokens) is not None
        (table,) = manager.block_ids("a")
        assert [b == NULL_BLOCK for b in table] == [True] * 4 + [False]
        assert manager.num_free_blocks == 2

    def test_a_state_at_a_boundary_is_found_after_its_step(self) -> None:
        manager = self.make(cache_config({"full": 20, "recurrent": 9}, "full", "recurrent"))
        tokens = list(range(12))
        sequence = FakeSequence("a", tokens)
        advance(manager, sequence, 8)
        # The blocks of keys are there, but what reads a state reads it as others write.
        assert self.hit(manager, [*tokens[:8], 99]) == 0
        advance(manager, sequence, 1)
        match = manager.match_prefix(FakeSequence("b", [*tokens[:8], 99]))
        assert match.num_tokens == 8
        assert match.block_ids[1] == [NULL_BLOCK, sequence.table[1][1]]
        assert sequence.table[1][1] != sequence.table[1][2], "the snapshot is written no more"

    def test_a_hit_ends_where_a_state_is(self) -> None:
        manager = self.make(cache_config({"full": 30, "recurrent": 9}, "full", "recurrent"))
        tokens = list(range(21))
        sequence = FakeSequence("a", tokens)
        for count in (8, 6, 7):  # states after 8, 14 and 21 tokens
            advance(manager, sequence, count)
        manager.free("a")
        assert self.hit(manager, [*tokens, 1]) == 8
        assert self.hit(manager, [*tokens[:7], 99, 98]) == 0

    def test_who_begins_from_a_snapshot_writes_to_another_block(self) -> None:
        manager = self.make(cache_config({"full": 30, "recurrent": 4}, "full", "recurrent"))
        first = run_whole(manager, "a", list(range(8)))
        snapshot = first.table[1][1]
        others = [FakeSequence(name, [*range(8), 50 + i, 1]) for i, name in enumerate("bc")]
        for sequence in others:
            assert advance(manager, sequence, 1, match=True) is not None
            assert sequence.table[1][:2] == [NULL_BLOCK, snapshot]
        assert others[0].table[1][2] != others[1].table[1][2]
        assert manager.allocate(others[0], 1) is not None
        assert manager.allocate(others[1], 1) is not None
        assert self.hit(manager, [*range(8), 9]) == 8, "it stays, for others"

    def test_of_generated_tokens_only_the_latest_snapshot_stays(self) -> None:
        manager = self.make(cache_config({"full": 30, "recurrent": 9}, "full", "recurrent"))
        sequence = FakeSequence("a", [0, 1, 2, 3, 4])
        advance(manager, sequence, 4, match=True)
        for token in range(5, 20):
            advance(manager, sequence, 1)
            sequence.all_token_ids.append(token)
        tokens = [*range(17), 99, 99, 99, 99]
        assert [self.hit(manager, tokens[:n]) for n in (5, 9, 13, 17)] == [4, 4, 4, 16]
        assert self.hit(manager, [0, 1, 2, 3, 99]) == 4, "and that of the prompt"
        manager.free("a")
        assert self.hit(manager, tokens) == 16

    def test_snapshots_starve_nobody(self) -> None:
        manager = self.make(cache_config({"full": 40, "recurrent": 3}, "full", "recurrent"))
        running = [FakeSequence(name, [ord(name)] * 20) for name in "ab"]
        for sequence in running:
            assert advance(manager, sequence, 4, match=True) is not None
        for _ in range(16):
            for sequence in running:
                assert advance(manager, sequence, 1) is not None
        assert [len({*s.table[1]} - {NULL_BLOCK}) for s in running] == [1, 1]

    def test_where_a_prompt_is_worth_ending_a_step(self) -> None:
        manager = self.make(cache_config({"full": 40, "recurrent": 9}, "full", "recurrent"))
        sequence = FakeSequence("a", list(range(19)))
        assert [manager.snapshot_at(sequence, n) for n in (0, 15, 16, 18)] == [16, 16, 0, 0]
        whole = FakeSequence("b", list(range(16)))
        assert manager.snapshot_at(whole, 0) == 12, "one token at least is computed"
        assert self.make(cache_config(9)).snapshot_at(sequence, 0) == 0
        uncached = self.make(cache_config(9, "recurrent"), enable_prefix_caching=False)
        assert uncached.snapshot_at(sequence, 0) == 0

    def test_a_prompt_that_parts_from_another_leaves_a_state_there(self) -> None:
        manager = self.make(cache_config({"full": 40, "recurrent": 9}, "full", "recurrent"))
        run_whole(manager, "a", list(range(20)))
        sequence = FakeSequence("b", [*range(9), *range(50, 60)])
        match = manager.match_prefix(sequence)
        assert match.num_tokens == 0, "no state is there, but eight tokens' keys are"
        assert [manager.snapshot_at(sequence, n) for n in (0, 8, 16)] == [8, 16, 0]

    # -- several pools -------------------------------------------------------------------------

    @pytest.mark.parametrize("narrow", ["full", "wide"])
    def test_every_pool_must_have_room(self, narrow: str) -> None:
        sizes = {"full": 9, "wide": 9} | {narrow: 4}
        manager = self.make(cache_config(sizes, "full", "wide"))
        assert manager.num_blocks == manager.num_free_blocks == 8 + 3
        assert manager.fits(12)
        assert not manager.fits(13)
        sequence = FakeSequence("a", list(range(20)))
        assert advance(manager, sequence, 8) is not None
        table, free = manager.block_ids("a"), manager.num_free_blocks
        assert advance(manager, sequence, 5) is None
        assert advance(manager, FakeSequence("b", list(range(50, 60))), 5, match=True) is None
        assert (manager.block_ids("a"), manager.num_free_blocks) == (table, free)
        assert manager.usage == pytest.approx(2 / 3)
        assert advance(manager, sequence, 4) is not None

    def test_fits_counts_a_state_and_the_one_it_began_from(self) -> None:
        config = cache_config({"full": 9, "recurrent": 2}, "full", "recurrent")
        assert self.make(config, enable_prefix_caching=False).fits(32)
        assert not self.make(config).fits(1)
        assert self.make(cache_config({"full": 9, "recurrent": 3}, "full", "recurrent")).fits(32)

    # -- everything at once --------------------------------------------------------------------

    @pytest.mark.parametrize(
        "groups",
        [
            ("full",), ("sliding",), ("full", "sliding", "sliding"), ("full", "cross"), ("chunked",),
            ("recurrent",), ("full", "chunked", "latent"), ("wide", "sliding", "recurrent"),
            ("recurrent", "full", "recurrent"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("seed", range(5))
    def test_random_use_keeps_the_count(self, groups: tuple[str, ...], seed: int) -> None:
        """Every block is referenced or free, and shared only by equal prefixes."""
        rng = random.Random(seed)
        encodes = "cross" in groups
        manager = self.make(cache_config(40, *groups), enable_prefix_caching=not encodes)
        running: dict[str, FakeSequence] = {}
        for number in range(300):
            if running and rng.random() < 0.3:
                manager.free(running.pop(rng.choice(list(running))).request_id)
            elif running and rng.random() < 0.6:
                sequence = rng.choice(list(running.values()))
                room = len(sequence.all_token_ids) - sequence.num_computed_tokens
                if room:
                    advance(manager, sequence, rng.randint(1, room))
            else:
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 40))]
                states = rng.randint(1, MAX_ENCODER_LEN) if encodes else 0
                sequence = FakeSequence(f"r{number}", tokens, num_encoder_tokens=states)
                rest = len(tokens) - manager.match_prefix(sequence).num_tokens
                if advance(manager, sequence, rng.randint(1, rest), match=True) is not None:
                    running[sequence.request_id] = sequence
            _check_tables(manager, running, groups)
        for request_id in running:
            manager.free(request_id)
        assert manager.num_free_blocks == manager.num_blocks


def _check_tables(
    manager: Manager, running: dict[str, FakeSequence], groups: Sequence[str]
) -> None:
    held: Counter[tuple[int, str, int, str, tuple[int, ...]]] = Counter()
    for sequence in running.values():
        for group, table in enumerate(manager.block_ids(sequence.request_id)):
            cross = groups[group] == "cross"
            held_for = sequence.num_encoder_tokens if cross else sequence.num_computed_tokens
            assert len(table) == -(-held_for // BLOCK_SIZE)
            pool = groups[group] if groups[group] in OWN_POOL else ""
            for index, block_id in enumerate(table):
                if block_id != NULL_BLOCK:
                    assert block_id == sequence.table[group][index]
                    end = (index + 1) * BLOCK_SIZE
                    is_state = groups[group] == "recurrent"
                    if is_state:
                        end = min(end, held_for)
                    # A state that is written next is nobody else's, and so is an encoder's.
                    alone = "cross" in groups or (is_state and index == len(table) - 1)
                    owner = sequence.request_id if alone else ""
                    prefix = tuple(sequence.all_token_ids[:end])
                    held[block_id, pool, group, owner, prefix] += 1
    blocks = [(block_id, pool) for block_id, pool, *_ in held]
    assert len(blocks) == len(set(blocks)), "a block belongs to two groups or to two contents"
    assert manager.num_free_blocks == manager.num_blocks - len(blocks)
