"""``paged`` keeps the contract of attention backends."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace_attention.metadata import PagedMetadata
from headrace_attention.paged import PagedBackend
from headrace_core.attention import AttentionLayerSpec
from headrace_core.ops import OpTable
from headrace_testing.attention.backends import BASIC_CASES, AttentionBackendConformance, World
from headrace_testing.attention.cross import CrossAttentionConformance


class TestPaged(AttentionBackendConformance):
    backend_class = PagedBackend


class TestPagedCross(CrossAttentionConformance):
    backend_class = PagedBackend


def test_a_block_is_one_piece_of_memory(reference_ops: OpTable) -> None:
    """Logical (2, N, S, Hk, D) is stored as (N, 2, Hk, S, D)."""
    world = World(PagedBackend(reference_ops), BASIC_CASES["decode"], "float32")
    kinds, blocks, size, heads, dim = world.kv_cache.shape
    numbered = torch.arange(world.kv_cache.numel()).view(blocks, kinds, heads, size, dim)
    world.kv_cache.copy_(numbered.permute(1, 0, 3, 2, 4))
    raw = torch.empty(0).set_(world.kv_cache.untyped_storage())
    assert torch.equal(raw, torch.arange(world.kv_cache.numel(), dtype=torch.float32))


def test_where_ops_pair_caches_they_get_paired_ones(reference_ops: OpTable) -> None:
    """Same results, same bytes to allocate; other dtypes stay plain."""
    case = dataclasses.replace(BASIC_CASES["mixed"], block_size=16, head_dim=32)
    pairing = PagedBackend(dataclasses.replace(reference_ops, vnni_packed=True))
    plain = PagedBackend(reference_ops)
    cache = World(plain, case, "bfloat16").kv_cache
    assert pairing.views(cache).key_cache.dim() == 6
    assert pairing.views(cache.float()).key_cache.dim() == 4
    assert plain.views(cache).key_cache.dim() == 4

    layer = AttentionLayerSpec("layer", 4, 2, 32, scale=0.4)
    metadata = PagedMetadata(
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        slot_mapping=torch.arange(16, 38),
        cu_seqlens_q=torch.tensor([0, 22], dtype=torch.int32),
        seq_lens=torch.tensor([22], dtype=torch.int32),
        max_seqlen_q=22,
        max_seqlen_k=22,
    )
    query, (key, value) = torch.randn(22, 4, 32).bfloat16(), torch.randn(2, 22, 2, 32).bfloat16()
    outs = []
    for backend in (plain, pairing):
        memory = torch.zeros(3, 2, 2, 16, 32).bfloat16().permute(1, 0, 3, 2, 4)
        outs.append(backend.forward(layer, query, key, value, memory, metadata))
    assert torch.equal(*outs)


def test_half_a_pair_of_key_and_value_is_an_error(reference_ops: OpTable) -> None:
    world = World(PagedBackend(reference_ops), BASIC_CASES["decode"], "float32")
    with pytest.raises(ValueError, match="both be given, or neither"):
        world.run(value=None)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_cache_of_one_byte(reference_ops: OpTable, dtype: str) -> None:
    """Scales of the layer reach both ops: as if keys and values had been rounded beforehand."""
    stored_as, scale = getattr(torch, dtype), torch.tensor([0.02, 0.3])
    layer = AttentionLayerSpec("layer", 4, 2, 8, scale=0.4, k_scale=scale, v_scale=scale * 2)
    plain = dataclasses.replace(layer, k_scale=None, v_scale=None)
    metadata = PagedMetadata(
        block_table=torch.tensor([[1, 2]], dtype=torch.int32),
        slot_mapping=torch.arange(4, 10),
        cu_seqlens_q=torch.tensor([0, 6], dtype=torch.int32),
        seq_lens=torch.tensor([6], dtype=torch.int32),
        max_seqlen_q=6,
        max_seqlen_k=6,
    )
    query, (key, value) = torch.randn(6, 4, 8), torch.randn(2, 6, 2, 8)
    backend = PagedBackend(reference_ops)
    small = torch.zeros(2, 3, 4, 2, 8).to(stored_as)
    out = backend.forward(layer, query, key, value, small, metadata)

    rounded = [
        _rounded(x / s[:, None], stored_as) * s[:, None]
        for x, s in ((key, scale), (value, scale * 2))
    ]
    wide = torch.zeros(2, 3, 4, 2, 8)
    expected = backend.forward(plain, query, *rounded, wide, metadata)
    torch.testing.assert_close(out, expected)
    assert (out - backend.forward(plain, query, key, value, wide, metadata)).abs().max() > 1e-3


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.int8:
        return x.round().clamp(-127, 127)
    return x.to(dtype).float()
