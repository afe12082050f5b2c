"""Attention of ranks that keep a part of the keys each, as each rank's process computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace_attention.context_parallel import KeySharingChooser
from headrace_attention.paged import PagedBackend
from headrace_core.attention import AttentionBackend, AttentionLayerSpec, AttentionNeed
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import FullAttentionSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.parallel import Communicator, SingleProcess

HEADS, HEAD_DIM, PAGE = 4, 32, 8
STEPS = (((0, 530), (0, 3)), ((530, 531), (3, 40)), ((531, 532), (40, 41)))
"""By step: (first, end) of each request's new tokens."""


def attended(group: Communicator, dtype: str, interleave: int) -> list[Tensor]:
    """Each step's output of this rank's heads, [T, heads, D]."""
    ops = bind_ops(KernelNeed("cpu", dtype))
    backend: AttentionBackend = PagedBackend(ops)
    size = group.world_size
    if not isinstance(group, SingleProcess):
        need = AttentionNeed(HEAD_DIM, dtype, "auto", PAGE)
        backend = KeySharingChooser(ops, group, interleave)(need, backend)
    own = slice(group.rank * HEADS // size, (group.rank + 1) * HEADS // size)
    layer = AttentionLayerSpec("layer", HEADS // size, 1, HEAD_DIM, scale=0.4)
    spec = FullAttentionSpec(PAGE * size, 1, HEAD_DIM, dtype, ranks=size)
    shape, order = backend.cache_shape(spec, 100), backend.cache_stride_order()
    cache = torch.zeros([shape[i] for i in order], dtype=getattr(torch, dtype))
    cache = cache.permute([order.index(i) for i in range(len(order))])
    generator = torch.Generator().manual_seed(3)
    outs = []
    for step in STEPS:
        batch = _batch(step, spec.block_size)
        query, key, value = (
            torch.randn(batch.num_tokens, heads, HEAD_DIM, generator=generator).to(cache.dtype)
            for heads in (HEADS, 1, 1)
        )
        metadata = backend.prepare(batch, 0)
        outs.append(backend.forward(layer, query[:, own], key, value, cache, metadata))
    return outs


def _batch(step: Sequence[tuple[int, int]], block_size: int) -> ForwardBatch:
    most = -(-max(end for request in STEPS for _, end in request) // block_size)
    table = torch.arange(1, 1 + len(step) * most, dtype=torch.int32).flip(0).view(len(step), most)
    positions = [torch.arange(first, end) for first, end in step]
    slots = [
        table[b].long()[p // block_size] * block_size + p % block_size
        for b, p in enumerate(positions)
    ]
    new = [end - first for first, end in step]
    return ForwardBatch(
        input_ids=torch.cat(positions),
        positions=torch.cat(positions),
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(),
        seq_lens=torch.tensor([end for _, end in step], dtype=torch.int32),
        max_seqlen_q=max(new),
        max_seqlen_k=max(end for _, end in step),
        groups=(GroupBatch(table, torch.cat(slots)),),
    )
