from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    CacheSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MLASpec,
    RecurrentSpec,
    SlidingWindowSpec,
    SparseIndexerSpec,
    StateShape,
)
from headrace_engine.kv.grouping import largest_share, of_layers, plan_groups

FULL = FullAttentionSpec(16, 2, 8, "float32")
SLIDING = SlidingWindowSpec(16, 2, 8, "float32", sliding_window=32)


def layers(pattern: str) -> dict[str, CacheSpec]:
    return {f"l{i}": FULL if kind == "f" else SLIDING for i, kind in enumerate(pattern)}


def test_one_kind_is_one_group() -> None:
    (group,) = plan_groups(layers("ffff"))
    assert (group.layer_names, group.spec) == (("l0", "l1", "l2", "l3"), FULL)


def test_two_kinds_are_cut_into_equal_groups() -> None:
    groups = plan_groups(layers("ssssf" * 2))
    assert [group.layer_names for group in groups] == [
        ("l0", "l1"), ("l2", "l3"), ("l5", "l6"), ("l7", "l8"), ("l4", "l9"),
    ]  # fmt: skip
    assert [group.spec for group in groups] == [SLIDING] * 4 + [FULL]
    assert KVCacheConfig((9,), groups).num_tensors(0) == 2


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "lengths"),
    [
        (5, 25, [5] * 6),
        (4, 22, [4, 4, 4, 4, 4, 3, 3]),  # two padded pages, not seven with groups of eleven
        (10, 52, [10, 13, 13, 13, 13]),  # three padded pages, not eight with groups of ten
        (4, 5, [4, 5]),
        (1, 3, [1, 1, 1, 1]),
        (6, 6, [6, 6]),
    ],
)
def test_group_sizes_waste_little(num_full: int, num_sliding: int, lengths: list[int]) -> None:
    groups = plan_groups(layers("f" * num_full + "s" * num_sliding))
    assert [len(group.layer_names) for group in groups] == lengths


@given(st.text("fs", min_size=1, max_size=70))
def test_every_layer_is_in_one_group_of_its_kind(pattern: str) -> None:
    specs = layers(pattern)
    groups = plan_groups(specs)
    assert sorted(n for group in groups for n in group.layer_names) == sorted(specs)
    assert all(specs[name] == group.spec for group in groups for name in group.layer_names)
    size = KVCacheConfig((9,), groups).num_tensors(0)
    kinds = {"f": pattern.count("f"), "s": pattern.count("s")}
    assert size * len(groups) - len(pattern) <= sum(-count % size for count in kinds.values())


def test_block_sizes_must_agree() -> None:
    other = FullAttentionSpec(32, 1, 8, "float32")
    with pytest.raises(ConfigError, match="block_size of layer 'a' is 16, of layer 'b' 32"):
        plan_groups({"a": FULL, "b": other})


def test_pages_of_another_size_are_another_pool() -> None:
    """As in models whose full layers have other heads; each pool has groups of its own length."""
    wide = FullAttentionSpec(16, 4, 8, "float32")
    specs = {f"l{i}": wide if i % 4 == 3 else SLIDING for i in range(12)}
    specs |= {f"e{i}": FULL for i in range(3)}
    groups = plan_groups(specs)
    assert [(len(g.layer_names), g.spec, g.pool) for g in groups] == [
        (3, SLIDING, 0), (3, SLIDING, 0), (3, SLIDING, 0), (3, wide, 1), (3, FULL, 0),
    ]  # fmt: skip
    config = KVCacheConfig((9, 5), groups)
    assert (config.groups_of(0), config.groups_of(1)) == ((0, 1, 2, 4), (3,))
    assert [config.block_bytes(pool) for pool in (0, 1)] == [3 * 2048, 3 * 4096]
    assert config.num_bytes == 9 * 3 * 2048 + 5 * 3 * 4096


def test_states_and_latents_have_pools_of_their_own() -> None:
    """Also where their pages are as large as others': they lie otherwise in the tensor."""
    latent = MLASpec(16, 1, 32, "float32")
    state = RecurrentSpec(16, (StateShape((512,), "float32"),))
    assert FULL.page_bytes == latent.page_bytes == state.page_bytes
    specs: dict[str, CacheSpec] = {"a": FULL, "b": latent, "c": state, "d": state, "e": SLIDING}
    groups = plan_groups(specs)
    assert [(g.layer_names, g.pool) for g in groups] == [
        (("a",), 0), (("b",), 1), (("c", "d"), 2), (("e",), 0)
    ]  # fmt: skip


def test_keys_of_an_indexer_have_a_pool_beside_latents() -> None:
    """They lie alike, and share blocks only where they are as long."""
    latent = MLASpec(16, 1, 32, "float32")
    short, long = (SparseIndexerSpec(16, 1, size, "float32") for size in (8, 32))
    specs: dict[str, CacheSpec] = {"a": latent, "a.indexer": short, "b": latent, "b.indexer": short}
    assert [(g.layer_names, g.spec, g.pool) for g in plan_groups(specs)] == [
        (("a", "b"), latent, 0), (("a.indexer", "b.indexer"), short, 1)
    ]  # fmt: skip
    specs = {"a": latent, "a.indexer": long}
    assert [(g.layer_names, g.pool) for g in plan_groups(specs)] == [
        (("a",), 0),
        (("a.indexer",), 0),
    ]


def test_no_layers() -> None:
    with pytest.raises(ConfigError, match="no layers"):
        plan_groups({})


def test_cross_attention_comes_last() -> None:
    cross = CrossAttentionSpec(16, 2, 8, "float32", max_encoder_tokens=50)
    specs: dict[str, CacheSpec] = {}
    for index in range(2):
        specs |= {f"cross{index}": cross, f"self{index}": FULL}
    groups = plan_groups(specs)
    assert [group.layer_names for group in groups] == [("self0", "self1"), ("cross0", "cross1")]


def test_each_stage_has_its_share_of_every_group() -> None:
    """Cut in one piece, a stage would have all layers of some groups: as many tensors as without stages."""
    specs = layers("ssssf" * 4)
    names = list(specs)
    stages = [names[:10], names[10:]]
    groups = plan_groups(specs, stages)
    assert [len(group.layer_names) for group in groups] == [4] * 5
    for stage in stages:
        assert [sum(name in stage for name in group.layer_names) for group in groups] == [2] * 5
    assert [len(group.layer_names) for group in largest_share(groups, stages)] == [2] * 5
    kept = of_layers(KVCacheConfig((9,), groups), stages[1])
    assert kept.num_tensors(0) == 2
    assert {name for group in kept.groups for name in group.layer_names} == set(stages[1])
