"""VNNI-packed caches: the same numbers in another order."""

from __future__ import annotations

import pytest
import torch

import headrace_reference as reference
from headrace_core.attention import KVViews
from headrace_core.ops.vnni import can_pack_vnni, is_vnni_packed, vnni_packed
from headrace_reference.vnni import plain_keys, plain_values

BLOCKS, SIZE, HEADS, DIM = 3, 32, 2, 48


@pytest.fixture
def plain() -> KVViews:
    memory = torch.zeros(BLOCKS, 2, HEADS, SIZE, DIM, dtype=torch.bfloat16)
    return KVViews(memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2))


def written(caches: KVViews) -> None:
    """Write random keys and values to all slots but one, in a random order."""
    torch.manual_seed(0)
    slots = torch.randperm(BLOCKS * SIZE)
    slots[7] = -1
    keys, values = (torch.randn(len(slots), HEADS, DIM).bfloat16() for _ in range(2))
    reference.cache_write(keys, values, *caches, slots)


def test_elements_are_where_the_definition_says(plain: KVViews) -> None:
    caches = vnni_packed(plain)
    keys, values = (torch.randn(1, HEADS, DIM).bfloat16() for _ in range(2))
    reference.cache_write(keys, values, *caches, torch.tensor([SIZE + 21]))
    for h, d in ((0, 0), (1, 17), (1, 47)):
        assert caches.key_cache[1, h, 1, d // 2, 5, d % 2] == keys[0, h, d]
        assert caches.value_cache[1, h, 10, d, 1] == values[0, h, d]
    assert caches.key_cache.count_nonzero() == keys.count_nonzero()
    assert caches.value_cache.count_nonzero() == values.count_nonzero()


def test_it_is_the_memory_of_the_plain_cache(plain: KVViews) -> None:
    for view, cache in zip(vnni_packed(plain), plain, strict=True):
        assert view.data_ptr() == cache.data_ptr()
        assert view.numel() == cache.numel()
        view.fill_(1)
        assert (cache == 1).all()
        cache.zero_()


def test_plain_copies_are_what_was_written(plain: KVViews) -> None:
    caches = vnni_packed(KVViews(*(torch.zeros_like(view) for view in plain)))
    written(plain)
    written(caches)
    assert torch.equal(plain_keys(caches.key_cache), plain.key_cache)
    assert torch.equal(plain_values(caches.value_cache), plain.value_cache)


def test_the_reference_reads_both_alike(plain: KVViews) -> None:
    caches = vnni_packed(KVViews(*(v.clone(memory_format=torch.preserve_format) for v in plain)))
    written(plain)
    written(caches)
    query = torch.randn(4, 4, DIM).bfloat16()
    table, ends = torch.tensor([[2, 0], [1, -1]]).int(), torch.tensor([0, 1, 4]).int()
    options = {"max_seqlen_q": 3, "max_seqlen_k": 40, "scale": 0.1}
    outs = [
        reference.paged_attention(query, *c, table, ends, torch.tensor([40, 30]).int(), **options)
        for c in (plain, caches)
    ]
    assert torch.equal(*outs)


def test_what_can_be_paired(plain: KVViews) -> None:
    assert can_pack_vnni(plain)
    assert is_vnni_packed(vnni_packed(plain).key_cache)
    assert not is_vnni_packed(plain.key_cache)
    assert not can_pack_vnni(KVViews(*(v.float() for v in plain))), "dtype"
    assert not can_pack_vnni(KVViews(*(v[:, :8] for v in plain))), "half a group of keys"
    assert not can_pack_vnni(KVViews(*(v[..., :40] for v in plain))), "head_dim"
    assert not can_pack_vnni(KVViews(*(v.contiguous() for v in plain))), "heads between tokens"
