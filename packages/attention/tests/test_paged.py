"""``paged`` keeps the contract of attention backends."""

from __future__ import annotations

import pytest
import torch

from headrace_attention.paged import PagedBackend
from headrace_core.ops import OpTable
from headrace_core.testing.attention import BASIC_CASES, AttentionBackendConformance, World

pytestmark = pytest.mark.spec("ATTN-BACKEND-IFACE")


class TestPaged(AttentionBackendConformance):
    backend_class = PagedBackend


@pytest.mark.spec("ATTN-KV-LAYOUT")
def test_a_block_is_one_piece_of_memory(reference_ops: OpTable) -> None:
    """Logical (2, N, S, Hk, D) is stored as (N, 2, Hk, S, D)."""
    world = World(PagedBackend(reference_ops), BASIC_CASES["decode"], "float32")
    kinds, blocks, size, heads, dim = world.kv_cache.shape
    numbered = torch.arange(world.kv_cache.numel()).view(blocks, kinds, heads, size, dim)
    world.kv_cache.copy_(numbered.permute(1, 0, 3, 2, 4))
    raw = torch.empty(0).set_(world.kv_cache.untyped_storage())
    assert torch.equal(raw, torch.arange(world.kv_cache.numel(), dtype=torch.float32))


def test_half_a_pair_of_key_and_value_is_an_error(reference_ops: OpTable) -> None:
    world = World(PagedBackend(reference_ops), BASIC_CASES["decode"], "float32")
    with pytest.raises(ValueError, match="both be given, or neither"):
        world.run(value=None)
