"""Ranks that divide prompts: each has the whole cache afterwards, and all get one rank's hidden states."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace_attention.mla import MLAOpsBackend
from headrace_attention.paged import PagedBackend
from headrace_attention.prefill_context import DividedPass, DividingChooser
from headrace_attention.sdpa import SDPABackend
from headrace_core.attention import (
    MLA,
    SLIDING_WINDOW,
    SPARSE_TOPK,
    AttentionBackend,
    AttentionLayerSpec,
    AttentionNeed,
)
from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import ConfigError
from headrace_core.ops import OpTable
from headrace_core.parallel import Communicator
from headrace_testing.model.decoders import run_ranks

NEED = AttentionNeed(8, "float32", "auto", 8)
LATENT, ROPE, HEADS, SIZE = 12, 4, 2, 8
STEPS = [[(0, 70), (0, 3), (0, 1)], [(70, 71), (3, 66), (1, 2)], [(71, 140), (66, 67), (2, 9)]]
"""By step: (first, end) of each request's new tokens. Each has one that two ranks divide."""


def tokens_of(step: list[tuple[int, int]], group_shift: int = 0) -> ForwardBatch:
    """Requests whose blocks are scattered; a second cache group has others."""
    generator = torch.Generator().manual_seed(5 + group_shift)
    table = 1 + torch.randperm(60, generator=generator, dtype=torch.int32).view(3, 20)
    positions = [torch.arange(first, end) for first, end in step]
    slots = [table[b].long()[p // SIZE] * SIZE + p % SIZE for b, p in enumerate(positions)]
    new = [end - first for first, end in step]
    return ForwardBatch(
        input_ids=torch.cat([1000 * b + p for b, p in enumerate(positions)]),
        positions=torch.cat(positions),
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int(),
        seq_lens=torch.tensor([end for _, end in step], dtype=torch.int32),
        max_seqlen_q=max(new),
        max_seqlen_k=max(end for _, end in step),
        groups=(GroupBatch(table, torch.cat(slots)),),
    )


def both_groups(step: list[tuple[int, int]]) -> ForwardBatch:
    first, second = tokens_of(step), tokens_of(step, 1)
    return dataclasses.replace(first, groups=first.groups + second.groups)


class OneLayerEach:
    """A model of two layers, in a cache group each, that knows its tokens by their numbers."""

    def __init__(self, backend: AttentionBackend, latent: bool, scaled: bool) -> None:
        self.backend = backend
        self.width = LATENT + ROPE if latent else 8
        table = torch.Generator().manual_seed(2)
        self.vectors = torch.randn(3000, HEADS + 2, self.width, generator=table)
        shape = (61, SIZE, self.width) if latent else (2, 61, SIZE, 1, 8)
        self.caches = [torch.full(shape, torch.nan) for _ in range(2)]
        self.specs = [
            AttentionLayerSpec(
                f"layer{i}", HEADS, 1, self.width, scale=0.4, latent_dim=LATENT if latent else 0,
                sliding_window=None if latent or i == 0 else 30,
            )
            for i in range(2)
        ]  # fmt: skip
        self.scales: list[Tensor] = []
        if scaled:  # of rows, which stand beside them in the cache
            self.caches = [torch.zeros(shape, dtype=torch.int8) for _ in range(2)]
            self.scales = [torch.full((2, 61, SIZE, 1), torch.nan) for _ in range(2)]
            self.specs = [
                dataclasses.replace(spec, k_scale=own[0], v_scale=own[1])
                for spec, own in zip(self.specs, self.scales)
            ]
        self.most_rows = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        """[R, 2 * HEADS * D]."""
        if not batch.attention:
            attention = tuple(self.backend.prepare(batch, g) for g in range(len(batch.groups)))
            batch = dataclasses.replace(batch, attention=attention)
        self.most_rows = max(self.most_rows, batch.num_tokens)
        own = self.vectors[batch.input_ids]
        outs = []
        for g, (spec, cache) in enumerate(zip(self.specs, self.caches)):
            query, key, value = own[:, :HEADS], own[:, HEADS : HEADS + 1], own[:, HEADS + 1 :]
            meta = batch.attention[g] if batch.attention else None
            kv = cache if batch.attention else None
            outs.append(self.backend.forward(spec, query, key, value, kv, meta).flatten(1))
        states = torch.cat(outs, dim=1)
        return states if batch.logits_rows is None else states[batch.logits_rows]


def written(model: OneLayerEach, batches: list[ForwardBatch]) -> Iterator[Tensor]:
    """What the slots of all steps hold."""
    for g, cache in enumerate(model.caches):
        slots = torch.cat([batch.groups[g].slot_mapping for batch in batches])
        tensors = [cache, *(model.scales[g : g + 1])]
        for tensor in tensors:
            flat = tensor if tensor.dim() == 3 else tensor.movedim(0, 2)
            yield flat.flatten(0, 1)[slots]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["paged", "latent", "scaled"])
def test_all_ranks_have_what_one_has(reference_ops: OpTable, ranks: int, kind: str) -> None:
    latent = kind == "latent"
    plain = (MLAOpsBackend if latent else PagedBackend)(reference_ops)
    batches = [both_groups(step) for step in STEPS]
    wanted = torch.tensor([len(batches[0].input_ids) - 1, 69, 2])
    batches[0] = dataclasses.replace(batches[0], logits_rows=wanted)

    def alone() -> tuple[list[Tensor], list[Tensor]]:
        model = OneLayerEach(plain, latent, kind == "scaled")
        return [model.forward(batch) for batch in batches], list(written(model, batches))

    def work(group: Communicator) -> tuple[list[Tensor], list[Tensor], int]:
        need = dataclasses.replace(NEED, features=frozenset({MLA} if latent else {SLIDING_WINDOW}))
        backend = DividingChooser(reference_ops, ranks)(need, plain)
        model = OneLayerEach(backend, latent, kind == "scaled")
        divided = DividedPass(lambda: group, ranks, SIZE, least_tokens=20)
        outs = [divided.run(model.forward, batch) for batch in batches]
        return outs, list(written(model, batches)), model.most_rows

    expected, cache = alone()
    for outs, kept, most_rows in run_ranks(ranks, work):
        for out, whole in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(kept, cache, strict=True))
        assert most_rows < 60, "no rank computes everything"


def run_alone(change: Callable[[ForwardBatch], ForwardBatch]) -> bool:
    """True if a step is divided that has this changed."""

    def refuse() -> Communicator:
        raise AssertionError("nothing is exchanged")

    return DividedPass(refuse, 2, SIZE, least_tokens=20).divides(change(tokens_of(STEPS[0])))


def test_steps_with_more_than_tokens_run_whole() -> None:
    assert run_alone(lambda batch: batch)
    for name, value in (
        ("token_type_ids", torch.zeros(74)),
        ("encoder_states", torch.zeros(3, 4)),
        ("key_lens", torch.ones(3)),
        ("last_keys", torch.ones(74)),
        ("extra", {"input_embeds": 1}),
    ):
        assert not run_alone(lambda batch, n=name, v=value: dataclasses.replace(batch, **{n: v}))  # type: ignore[misc]


def test_profiling_divides_and_exchanges_no_cache(reference_ops: OpTable) -> None:
    """Without a cache there are no groups; memory is that of a rank's part."""
    batch = dataclasses.replace(tokens_of(STEPS[0]), groups=(), logits_rows=torch.tensor([73]))

    def work(group: Communicator) -> tuple[Tensor, int]:
        backend = DividingChooser(reference_ops, 2)(NEED, PagedBackend(reference_ops))
        model = OneLayerEach(backend, False, False)
        out = DividedPass(lambda: group, 2, SIZE, least_tokens=20).run(model.forward, batch)
        return out, model.most_rows

    for out, rows in run_ranks(2, work):
        assert torch.equal(out, torch.zeros(1, 32))
        assert rows < 45


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"features": frozenset({MLA, SPARSE_TOPK})}, "sparse attention"),
        ({"attention_type": "encoder_decoder"}, "encoder_decoder"),
    ],
)
def test_layers_that_are_refused(
    reference_ops: OpTable, change: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as error:
        DividingChooser(reference_ops, 2)(
            dataclasses.replace(NEED, **change), PagedBackend(reference_ops)  # type: ignore[arg-type]
        )  # fmt: skip
    assert error.value.field == "parallel.prefill_context_parallel_size"


def test_other_backends_are_refused(reference_ops: OpTable) -> None:
    choose = DividingChooser(reference_ops, 2)
    with pytest.raises(ConfigError, match="'sdpa'"):
        choose(NEED, SDPABackend(reference_ops))
    backend = PagedBackend(reference_ops)
    assert choose(NEED, backend) is choose(dataclasses.replace(NEED, head_dim=16), backend)
