from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.errors import CapacityError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    RecurrentSpec,
    SlidingWindowSpec,
    StateShape,
)
from headrace_engine.config import CacheConfig
from headrace_engine.execution.division import CacheLimits, pool_needs
from headrace_engine.execution.memory import (
    CPU_CACHE_BYTES,
    CachePlan,
    fit_max_model_len,
    plan_cache,
    readable,
    spare_bytes,
)

GIB = 1 << 30
SPEC = FullAttentionSpec(16, 2, 32, "float32")
GROUPS = (KVCacheGroup(("a", "b"), SPEC),)
BLOCK = 2 * SPEC.page_bytes  # two layers
SLIDING = SlidingWindowSpec(16, 2, 32, "float32", sliding_window=64)
HYBRID = (KVCacheGroup(("a", "b"), SPEC), KVCacheGroup(("c", "d"), SLIDING))


def profile(available: int = 8 * GIB, weights: int = GIB, activations: int = GIB // 2) -> Any:
    return MemoryProfile(weights, activations, available)


def plan(cache: CacheConfig | None = None, **changes: Any) -> Any:
    settings: dict[str, Any] = {"max_model_len": 1000, "max_num_seqs": 8}
    settings.update(changes)
    memory = settings.pop("profile", profile())
    groups, device = settings.pop("groups", GROUPS), settings.pop("device", "cuda")
    return plan_cache(
        memory, groups, cache or CacheConfig(), CacheLimits(**settings), device=device
    )


def blocks_for(groups: Any, length: int, step: int | None = None) -> int:
    (need,) = pool_needs(groups, CacheLimits(length, 1, step))
    return need.needed


def longest(cache: CacheConfig, limit: int, device: str = "cpu", **changes: Any) -> int:
    memory, groups = changes.pop("profile", profile()), changes.pop("groups", GROUPS)
    return fit_max_model_len(memory, groups, cache, CacheLimits(limit, 1, **changes), device=device)


def test_the_override_is_the_number_of_usable_blocks() -> None:
    got = plan(CacheConfig(num_gpu_blocks_override=70, kv_cache_memory_bytes=1 << 30))
    assert got.config.pools == (71,)
    assert got.decided_by == "num_gpu_blocks_override"
    assert got.largest_batch == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kv_cache_memory_bytes_fixes_the_block_count(device: str) -> None:
    got = plan(CacheConfig(kv_cache_memory_bytes=100 * BLOCK + 5), device=device)
    assert got.config.pools == (100,)
    assert got.cache == 100 * BLOCK
    assert got.config.groups == GROUPS


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_chosen_size_beyond_the_memory_is_refused_by_its_flag(device: str) -> None:
    """8 GiB, of which weights and activations take 1.5: a byte more than the rest is too much."""
    whole = plan(CacheConfig(kv_cache_memory_bytes=6 * GIB + GIB // 2), device=device)
    assert whole.cache <= 6 * GIB + GIB // 2
    for flag, cache in (
        ("--kv-cache-memory-bytes", CacheConfig(kv_cache_memory_bytes=6 * GIB + GIB // 2 + BLOCK)),
        ("--num-gpu-blocks-override", CacheConfig(num_gpu_blocks_override=10 * GIB // BLOCK)),
        # The override wins, so it is what is told.
        ("--num-gpu-blocks-override", CacheConfig(num_gpu_blocks_override=10 * GIB // BLOCK,
                                                  kv_cache_memory_bytes=GIB)),
    ):  # fmt: skip
        with pytest.raises(CapacityError, match=f"^{flag} = ") as caught:
            plan(cache, device=device)
        assert "6.50 GiB of memory are left for it (8.00 GiB free at start" in str(caught.value)
        assert re.search(r"takes (6\.50|10\.00) GiB", str(caught.value))


def test_a_chosen_size_beyond_a_small_machine_is_told_in_gibibytes() -> None:
    memory = profile(available=300 << 20, weights=200 << 20, activations=0)
    with pytest.raises(
        CapacityError, match=r"takes 0\.195 GiB, and 0\.0977 GiB of memory are left"
    ):
        plan(CacheConfig(kv_cache_memory_bytes=200 << 20), profile=memory)


def test_the_share_is_what_weights_and_activations_leave() -> None:
    got = plan(CacheConfig(gpu_memory_utilization=0.5), device="cuda:1")
    assert got.config.pools == ((4 * GIB - GIB - GIB // 2) // BLOCK,)
    assert got.largest_batch == (got.config.pools[0] - 1) // 63


def test_a_cpu_gets_no_more_than_is_useful() -> None:
    got = plan(device="cpu")
    assert got.config.pools == (2 * 8 * 63 + 1,)
    assert "full batches" in got.decided_by


def test_a_cpu_gets_no_more_than_the_default() -> None:
    got = plan(device="cpu", max_num_seqs=256, max_model_len=8192)
    assert got.config.pools == (CPU_CACHE_BYTES // BLOCK,)
    assert "default on a CPU" in got.decided_by


def test_but_enough_for_one_request() -> None:
    tokens = CPU_CACHE_BYTES // BLOCK * 16 + 1000
    got = plan(device="cpu", profile=profile(available=32 * GIB), max_model_len=tokens)
    assert got.largest_batch == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_too_little_memory_says_what_is_missing_and_what_fits(device: str) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(CacheConfig(kv_cache_memory_bytes=11 * BLOCK), device=device)
    message = str(caught.value)
    assert "max_model_len = 1000" in message
    assert f"{readable((63 + 1 - 11) * BLOCK)} more" in message
    length = int(re.search(r"at most (\d+) would fit", message).group(1))  # type: ignore[union-attr]
    assert length == 160
    assert plan(CacheConfig(kv_cache_memory_bytes=11 * BLOCK), max_model_len=length)
    with pytest.raises(CapacityError):
        plan(CacheConfig(kv_cache_memory_bytes=11 * BLOCK), max_model_len=length + 1)


def test_weights_alone_too_large() -> None:
    with pytest.raises(CapacityError, match="no context fits at all"):
        plan(profile=profile(available=GIB))


def test_minus_one_is_the_longest_that_fits() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=11 * BLOCK)
    assert longest(cache, 4096) == 160
    roomy = CacheConfig(kv_cache_memory_bytes=1000 * BLOCK)
    assert longest(roomy, 4096) == 4096
    with pytest.raises(CapacityError):
        longest(CacheConfig(), 64, "cuda", profile=profile(available=GIB))


def test_minus_one_may_use_more_than_the_cpu_default() -> None:
    limit = CPU_CACHE_BYTES // BLOCK * 16 * 2
    assert longest(CacheConfig(), limit, profile=profile(available=64 * GIB)) == limit


def test_groups_add_up_and_windows_are_bounded() -> None:
    assert blocks_for(HYBRID, 1000) == 63 + 63
    # 63 tokens before a step of 32, at the worst alignment
    assert blocks_for(HYBRID, 1000, 32) == 63 + 7
    assert blocks_for(HYBRID, 16, 32) == 2


@given(blocks=st.integers(2, 200), limit=st.integers(1, 5000), step=st.none() | st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_the_longest_that_fits_fits_and_one_more_does_not(
    blocks: int, limit: int, step: int | None
) -> None:
    cache = CacheConfig(kv_cache_memory_bytes=blocks * BLOCK)
    try:
        fits = longest(cache, limit, "cuda", groups=HYBRID, max_num_batched_tokens=step)
    except CapacityError:
        assert blocks_for(HYBRID, 1, step) > blocks - 1
        return
    assert blocks_for(HYBRID, fits, step) <= blocks - 1
    assert fits == limit or blocks_for(HYBRID, fits + 1, step) > blocks - 1


@pytest.mark.req("REL-23")
def test_the_plan_is_described() -> None:
    text = plan(CacheConfig(kv_cache_memory_bytes=200 * BLOCK)).describe()
    assert "8.00 GiB were free" in text
    assert re.search(r"weights +1.00 GiB", text)
    assert re.search(r"activations +512.00 MiB", text)
    assert "199 blocks of 16 tokens in 1 group, by kv_cache_memory_bytes" in text
    assert "3 requests of 1000 tokens" in text


def test_a_longest_request_comes_with_its_encoder_states() -> None:
    cross = CrossAttentionSpec(16, 2, 32, "float32", max_encoder_tokens=1500)
    groups = (*GROUPS, KVCacheGroup(("c", "d"), cross))
    assert blocks_for(groups, 448) == 28 + 94
    got = plan(CacheConfig(num_gpu_blocks_override=250), groups=groups, max_model_len=448)
    assert got.largest_batch == 2
    assert "2 requests of 448 tokens and 1500 encoder states" in got.describe()
    with pytest.raises(CapacityError, match="max_model_len of at most 96 would fit"):
        plan(CacheConfig(num_gpu_blocks_override=100), groups=groups, max_model_len=448)


def test_max_memory_bytes_is_the_share() -> None:
    got = plan(CacheConfig(max_memory_bytes=2 * GIB))
    assert (got.decided_by, got.cache) == ("max_memory_bytes", GIB // 2 // BLOCK * BLOCK)
    fixed = CacheConfig(max_memory_bytes=2 * GIB, kv_cache_memory_bytes=GIB)
    with pytest.raises(CapacityError, match=r"max_memory_bytes = 2147483648: weights \(1.00 GiB"):
        plan(fixed)


def test_a_model_without_a_cache_keeps_within_it_too() -> None:
    assert CachePlan.without_cache(profile(), 100, 2 * GIB).cache == 0
    with pytest.raises(CapacityError, match="take 1610612736 bytes"):
        CachePlan.without_cache(profile(), 100, GIB)


# -- several pools --------------------------------------------------------------------------------

WIDE = FullAttentionSpec(16, 2, 64, "float32")
STATE = RecurrentSpec(16, (StateShape((4, 1024), "float32"), StateShape((3, 5), "bfloat16")))
STATE_BLOCK = 3 * (4 * 4 * 1024 + 64)  # three layers, each tensor rounded up
TWO_POOLS = (KVCacheGroup(("a", "b"), SLIDING), KVCacheGroup(("c",), WIDE, 1))
RECURRENT = KVCacheGroup(("s", "t", "u"), STATE, 1)
MIXED = (*GROUPS, RECURRENT)


def test_pools_of_tokens_hold_equally_many_requests() -> None:
    got = plan(groups=TWO_POOLS, max_num_batched_tokens=32)
    # A request holds at most 7 blocks of the window's and 63 of the others, here as large.
    windows, whole = got.config.pools
    assert 0.99 < (windows - 1) / 7 / ((whole - 1) / 63) < 1.01
    assert got.cache <= 8 * GIB * 0.9 - 1.5 * GIB
    assert got.largest_batch == min((windows - 1) // 7, (whole - 1) // 63)


@pytest.mark.parametrize(("caching", "states"), [(False, 8), (True, 16)])
def test_states_are_for_the_sequences_that_run_and_snapshots(caching: bool, states: int) -> None:
    got = plan(groups=MIXED, caching=caching)
    tokens, count = got.config.pools
    assert count == states + 1
    left = int(8 * GIB * 0.9) - GIB - GIB // 2 - count * STATE_BLOCK
    assert tokens == left // BLOCK
    assert got.largest_batch == states
    assert plan(device="cpu", groups=MIXED, caching=caching).config.pools == (
        2 * 8 * 63 + 1, states + 1
    )  # fmt: skip


def test_states_take_at_most_half_of_what_one_request_leaves() -> None:
    least = 64 * BLOCK + 3 * STATE_BLOCK
    cache = CacheConfig(kv_cache_memory_bytes=least + 10 * STATE_BLOCK)
    got = plan(cache, groups=MIXED, max_num_seqs=100, caching=True)
    assert got.config.pools == (64 + 5 * STATE_BLOCK // BLOCK, 3 + 5)
    assert got.largest_batch == 1


def test_one_request_needs_a_state_and_the_one_it_begins_from() -> None:
    for caching, states in ((False, 1), (True, 2)):
        least = 64 * BLOCK + (states + 1) * STATE_BLOCK
        got = plan(CacheConfig(kv_cache_memory_bytes=least), groups=MIXED, caching=caching)
        assert got.config.pools == (64, states + 1)
        short = CacheConfig(kv_cache_memory_bytes=least - 1)
        with pytest.raises(
            CapacityError, match=r"for the states of recurrent layers\), [0-9.]+ [KM]iB more"
        ):
            plan(short, groups=MIXED, caching=caching)
        assert longest(short, 1000, groups=MIXED, caching=caching) == 62 * 16


def test_a_model_of_states_only_gives_them_all() -> None:
    only = (KVCacheGroup(RECURRENT.layer_names, STATE),)
    got = plan(CacheConfig(kv_cache_memory_bytes=50 * STATE_BLOCK), groups=only, caching=True)
    assert got.config.pools == (50,)
    assert "49 states of recurrent layers in 1 group, by kv_cache_memory_bytes" in got.describe()
    assert longest(CacheConfig(num_gpu_blocks_override=1), 10_000, groups=only) == 10_000


def test_the_override_is_of_the_pools_of_tokens() -> None:
    got = plan(CacheConfig(num_gpu_blocks_override=70), groups=(*TWO_POOLS[:1], RECURRENT))
    assert got.config.pools == (71, 9)
    assert plan(CacheConfig(num_gpu_blocks_override=70), groups=TWO_POOLS).config.pools == (71, 71)


def test_what_is_missing_is_of_the_pool_that_is_too_small() -> None:
    """Another pool may have more than it needs."""
    cache = CacheConfig(num_gpu_blocks_override=10)
    with pytest.raises(CapacityError, match=f", {readable(53 * BLOCK)} more than there are"):
        plan(cache, groups=MIXED)
    assert spare_bytes(profile(), MIXED, cache, CacheLimits(1000, 8)) == -53 * BLOCK


def test_every_pool_is_described() -> None:
    text = plan(CacheConfig(num_gpu_blocks_override=70), groups=MIXED).describe()
    assert "2 pools, by num_gpu_blocks_override" in text
    assert re.search(r"pool 0 +1.11 MiB  70 blocks of 16 tokens in 1 group", text)
    assert re.search(r"pool 1 .* 8 states of recurrent layers in 1 group", text)
    assert "room for     1 requests of 1000 tokens" in text


@given(
    num_bytes=st.integers(0, 3000 * BLOCK),
    length=st.integers(1, 3000),
    seqs=st.integers(1, 64),
    caching=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_a_division_is_within_its_budget_and_wastes_little(
    num_bytes: int, length: int, seqs: int, caching: bool
) -> None:
    groups = (*GROUPS, KVCacheGroup(("w",), WIDE, 1), KVCacheGroup(("s",), STATE, 2))
    cache = CacheConfig(kv_cache_memory_bytes=max(1, num_bytes))
    try:
        got = plan(cache, groups=groups, max_model_len=length, max_num_seqs=seqs, caching=caching)
    except CapacityError:
        return
    assert got.cache <= num_bytes
    assert num_bytes - got.cache < 3 * BLOCK + STATE_BLOCK
    needs = pool_needs(groups, CacheLimits(length, seqs, caching=caching))
    assert all(count > need.needed for count, need in zip(got.config.pools, needs))
