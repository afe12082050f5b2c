"""``latent`` writes its cache and attends as the ops do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_attention.selection import choose_backend
from headrace_core.attention import (
    MLA,
    SPARSE_TOPK,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import MLASpec
from headrace_core.ops import OpTable

LATENT, ROPE, HEADS, LENGTH = 12, 4, 3, 11
NEED = AttentionNeed(LATENT + ROPE, "float32", "auto", 8, features=frozenset({MLA}))


def layer() -> AttentionLayerSpec:
    return AttentionLayerSpec("layer", HEADS, 1, LATENT + ROPE, scale=0.3, latent_dim=LATENT)


def batch(first: int, last: int) -> ForwardBatch:
    """One request in blocks 2 and 1."""
    positions = torch.arange(first, last)
    slots = torch.tensor([16, 8])[positions // 8] + positions % 8
    group = GroupBatch(torch.tensor([[2, 1, 0]], dtype=torch.int32), slots)
    return ForwardBatch(
        input_ids=positions,
        positions=positions,
        cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32),
        seq_lens=torch.tensor([last], dtype=torch.int32),
        max_seqlen_q=last - first,
        max_seqlen_k=last,
        groups=(group,),
    )


def test_it_attends_to_what_it_wrote(reference_ops: OpTable) -> None:
    backend = MLAOpsBackend(reference_ops)
    spec = MLASpec(8, 1, LATENT + ROPE, "float32")
    cache = torch.full(backend.cache_shape(spec, 4), torch.nan)
    assert cache.shape == (4, 8, LATENT + ROPE)
    assert cache.permute(backend.cache_stride_order()).is_contiguous()
    query, vectors = torch.randn(LENGTH, HEADS, LATENT + ROPE), torch.randn(LENGTH, LATENT + ROPE)
    outs = []
    for first, last in ((0, 9), (9, 10), (10, LENGTH)):
        metadata = backend.prepare(batch(first, last), 0)
        rows = slice(first, last)
        whole = vectors[rows, None]
        outs.append(backend.forward(layer(), query[rows], whole, None, cache, metadata))
        again = backend.attend(
            layer(), query[rows, :, :LATENT], query[rows, :, LATENT:], None, None, cache, metadata
        )
        assert torch.equal(again, outs[-1])
    scores = torch.einsum("qhd,kd->hqk", query, vectors) * 0.3
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    expected = torch.einsum("hqk,kd->qhd", scores.softmax(-1), vectors[:, :LATENT])
    torch.testing.assert_close(torch.cat(outs), expected)


def test_profiling_gives_zeros(reference_ops: OpTable) -> None:
    query = torch.randn(5, HEADS, LATENT)
    rope = torch.randn(5, HEADS, ROPE)
    out = MLAOpsBackend(reference_ops).attend(layer(), query, rope, None, None, None, None)
    assert torch.equal(out, torch.zeros_like(query))


def test_half_of_a_vector_is_an_error(reference_ops: OpTable) -> None:
    backend = MLAOpsBackend(reference_ops)
    query, rope = torch.randn(1, HEADS, LATENT), torch.randn(1, HEADS, ROPE)
    cache, metadata = torch.zeros(4, 8, LATENT + ROPE), backend.prepare(batch(0, 1), 0)
    with pytest.raises(ValueError, match="both be given, or neither"):
        backend.attend(layer(), query, rope, torch.randn(1, LATENT), None, cache, metadata)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_serves_latent_attention_and_nothing_else(device: str) -> None:
    need = dataclasses.replace(NEED, device=device)
    assert choose_backend(need) is MLAOpsBackend
    assert MLAOpsBackend.refuse(dataclasses.replace(need, features=frozenset())) == [
        "non-MLA not supported"
    ]
    assert PagedBackend.refuse(need) == ["MLA not supported"]
    in_one_byte = dataclasses.replace(need, kv_cache_dtype="fp8")
    refused = ["kv_cache_dtype fp8 not supported on device cuda"] if device == "cuda" else []
    assert MLAOpsBackend.refuse(in_one_byte) == refused
    assert (
        MLAOpsBackend.refuse(dataclasses.replace(need, features=need.features | {SPARSE_TOPK}))
        == []
    )
