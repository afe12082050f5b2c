"""Ranks that keep a part of the keys each: the parts, their attention, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace_attention.context_parallel import (
    KeyShare,
    KeySharingChooser,
    SharedMLABackend,
    SharedPagedBackend,
)
from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_attention.sdpa import SDPABackend
from headrace_core.attention import (
    ALIBI,
    MLA,
    SINKS,
    SLIDING_WINDOW,
    SOFT_CAP,
    SPARSE_TOPK,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import ConfigError
from headrace_core.kv import FullAttentionSpec, KVCacheSpec, MLASpec
from headrace_core.ops import OpTable
from headrace_core.parallel import Communicator, SingleProcess
from headrace_testing.model.decoders import run_ranks

NEED = AttentionNeed(8, "float32", "auto", 8)
LATENT, ROPE, HEADS = 12, 4, 6
STEPS = [[(0, 21), (0, 3), (0, 1)], [(21, 22), (3, 40), (1, 2)], [(22, 23), (40, 41), (2, 9)]]
"""By step: (first, end) of each request's new tokens."""


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_each_rank_counts_its_keys(ranks: int, interleave: int) -> None:
    shares = [KeyShare(rank, ranks, interleave) for rank in range(ranks)]
    for length in range(50):
        expected = [sum(i // interleave % ranks == r for i in range(length)) for r in range(ranks)]
        assert [share.count(length) for share in shares] == expected


@pytest.mark.parametrize(("ranks", "interleave"), [(2, 1), (3, 1), (2, 4), (3, 8)])
@pytest.mark.parametrize("latent", [False, True], ids=["paged", "latent"])
def test_ranks_together_attend_to_all_keys(
    reference_ops: OpTable, ranks: int, interleave: int, latent: bool
) -> None:
    """Chunks, one-token steps and requests that a rank has no key of; the cache of each rank is as large as
    its share, and unwritten places are NaN."""
    head_dim = LATENT + ROPE if latent else 8
    queries, keys, values = _tokens(head_dim)
    layer = AttentionLayerSpec(
        "layer", HEADS, 1, head_dim, scale=0.4, latent_dim=LATENT if latent else 0,
        extras={} if latent else {"soft_cap": 4.0},
    )  # fmt: skip
    spec_class = MLASpec if latent else FullAttentionSpec
    backend: AttentionBackend = (MLAOpsBackend if latent else PagedBackend)(reference_ops)
    spec = spec_class(8 * ranks, 1, head_dim, "float32")
    expected = _run(backend, layer, spec, queries, keys, values)

    def work(group: Communicator) -> Sequence[Tensor]:
        choose = KeySharingChooser(reference_ops, group, interleave)
        need = dataclasses.replace(NEED, features=frozenset({MLA} if latent else {SOFT_CAP}))
        shared = choose(need, backend)
        assert choose(need, backend) is shared
        own = slice(group.rank * HEADS // ranks, (group.rank + 1) * HEADS // ranks)
        of_rank = dataclasses.replace(layer, num_heads=HEADS // ranks)
        share = spec_class(8 * ranks, 1, head_dim, "float32", ranks=ranks)
        assert share.page_bytes * ranks == spec.page_bytes
        mine = [[query[:, own] for query in step] for step in queries]
        return _run(shared, of_rank, share, mine, keys, values)

    found = run_ranks(ranks, work)
    for i, whole in enumerate(expected):
        together = torch.cat([outs[i] for outs in found], dim=1)
        torch.testing.assert_close(together, whole, rtol=1e-5, atol=1e-6)


def _tokens(head_dim: int) -> tuple[list[list[Tensor]], list[list[Tensor]], list[list[Tensor]]]:
    """Queries, keys and values of each step's requests."""
    torch.manual_seed(2)
    sizes = [[end - first for first, end in step] for step in STEPS]
    queries = [[3 * torch.randn(n, HEADS, head_dim) for n in step] for step in sizes]
    keys = [[torch.randn(n, 1, head_dim) for n in step] for step in sizes]
    values = [[torch.randn(n, 1, head_dim) for n in step] for step in sizes]
    return queries, keys, values


def _run(
    backend: AttentionBackend,
    layer: AttentionLayerSpec,
    spec: KVCacheSpec,
    queries: list[list[Tensor]],
    keys: list[list[Tensor]],
    values: list[list[Tensor]],
) -> list[Tensor]:
    """Outputs of each step over one cache."""
    cache = torch.full(backend.cache_shape(spec, 12), torch.nan)
    outs = []
    for i in range(len(STEPS)):
        batch = _batch(STEPS[i], spec.block_size)
        metadata = backend.prepare(batch, 0)
        query, key, value = (torch.cat(x[i]) for x in (queries, keys, values))
        outs.append(backend.forward(layer, query, key, value, cache, metadata))
    return outs


def _batch(step: list[tuple[int, int]], block_size: int) -> ForwardBatch:
    """Requests whose blocks are scattered among ten."""
    table = torch.tensor([[5, 2, 9, 4, 10], [3, 7, 11, 1, 6], [8, 0, 0, 0, 0]], dtype=torch.int32)
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


@pytest.mark.parametrize("latent", [False, True], ids=["paged", "latent"])
def test_profiling_exchanges_and_gives_zeros(reference_ops: OpTable, latent: bool) -> None:
    layer = AttentionLayerSpec("layer", 2, 1, 16, scale=1.0, latent_dim=LATENT if latent else 0)

    def work(group: Communicator) -> Tensor:
        made = SharedMLABackend if latent else SharedPagedBackend
        backend = made(reference_ops, group, KeyShare(group.rank, 2))
        return backend.forward(layer, torch.randn(5, 2, 16), None, None, None, None)

    for out in run_ranks(2, work):
        assert torch.equal(out, torch.zeros(5, 2, LATENT if latent else 16))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"features": frozenset({SLIDING_WINDOW, SOFT_CAP})}, "sliding window"),
        ({"features": frozenset({SINKS})}, "sink setting"),
        ({"features": frozenset({ALIBI})}, "ALiBi"),
        ({"features": frozenset({MLA, SPARSE_TOPK})}, "sparse"),
        ({"features": frozenset({"new"})}, "new"),
        ({"attention_type": "encoder_decoder"}, "encoder_decoder"),
    ],
)
def test_layers_that_go_by_positions_are_refused(
    reference_ops: OpTable, change: dict[str, object], match: str
) -> None:
    choose = KeySharingChooser(reference_ops, SingleProcess(), 1)
    with pytest.raises(ConfigError, match=match) as error:
        choose(dataclasses.replace(NEED, **change), PagedBackend(reference_ops))  # type: ignore[arg-type]
    assert error.value.field == "parallel.decode_context_parallel_size"


def test_other_backends_are_refused(reference_ops: OpTable) -> None:
    choose = KeySharingChooser(reference_ops, SingleProcess(), 1)
    with pytest.raises(ConfigError, match="'sdpa'"):
        choose(NEED, SDPABackend(reference_ops))
