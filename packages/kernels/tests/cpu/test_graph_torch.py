"""Operations of torch in a captured step: the kernels that stand for them give torch's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import CaptureRefused
from headrace_core.graph import GraphNeed
from headrace_core.ops import KernelProvider
from headrace_kernels.cpu import library
from headrace_kernels.cpu.graph import NativeStepGraph
from headrace_kernels.cpu.ops import native_ops
from headrace_kernels.cpu.provider import PROVIDER
from headrace_testing.graphs.steps import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NUM_GROUPS,
    VOCAB,
    SmallModel,
    StepGraphConformance,
    make_batch,
)
from headrace_testing.ops import bits_equal

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

NEED = GraphNeed((16,), max_num_seqs=8, num_groups=NUM_GROUPS)
BATCHES = ([(1, 9)], [(1, 5), (1, 9)], [(1, 5), (3, 9), (2, 12), (1, 1), (1, 3)])
Change = Callable[[Tensor], Tensor]


class TorchStep(SmallModel):
    """The small model with torch between the kernels, as foreign code has it: tokens in a batch of one,
    heads before tokens, rotation by halves, residuals that are added."""

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ops = self.ops
        x = ops["embedding"](batch.input_ids, self.embed).unsqueeze(0) * 3.0
        angles = torch.nn.functional.embedding(batch.positions.unsqueeze(0), self.cos_sin)
        angles = angles.to(x.dtype).unsqueeze(1)
        for group in range(NUM_GROUPS):
            x = x + self._torch_attention(ops["rms_norm"](x, self.norm, 1e-6), angles, batch, group)
            flat = ops["rms_norm"](x, self.norm, 1e-6)[0]
            x = x + (self._mlp(flat) if group else self._moe(flat)).unsqueeze(0)
        rows = x[0] if batch.logits_rows is None else ops["embedding"](batch.logits_rows, x[0])
        logits: Tensor = ops["linear"](rows, self.head).float() / 3.0
        return logits

    def _torch_attention(
        self, x: Tensor, angles: Tensor, batch: ForwardBatch, group: int
    ) -> Tensor:
        ops, where, (keys, values) = self.ops, batch.groups[group], self.caches[group]
        heads = ops["linear"](x[0], self.qkv, self.qkv_bias).view(1, x.shape[1], -1, HEAD_DIM)
        query, key, value = heads.transpose(1, 2).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        query, key = (_turned(each, angles)[0].transpose(0, 1) for each in (query, key))
        ops["cache_write"](key, value[0].transpose(0, 1), keys, values, where.slot_mapping)
        out = ops["paged_attention"](
            query, keys, values, where.block_table, batch.cu_seqlens_q, batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k,
            scale=HEAD_DIM**-0.5, sliding_window=10 if group else None,
        )  # fmt: skip
        projected: Tensor = ops["linear"](out.flatten(1), self.out)
        return projected.unsqueeze(0)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [1, H, T, D]."""
    half = x.shape[-1] // 2
    return x * angles + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * angles


class TestStepsWithTorch(StepGraphConformance):
    """On one instruction set: the others' bits are compared below."""

    @pytest.fixture
    def provider(self) -> KernelProvider:
        return PROVIDER

    def make(self, provider: KernelProvider, dtype: str) -> tuple[SmallModel, NativeStepGraph]:
        model, graph = super().make(provider, dtype)
        assert isinstance(graph, NativeStepGraph)
        changed = TorchStep.__new__(TorchStep)
        vars(changed).update(vars(model))
        return changed, graph


def heads(x: Tensor) -> Tensor:
    """[R, V] -> [1, 4, R, V / 4], as attention has it."""
    return x.view(1, x.shape[0], 4, -1).transpose(1, 2)


def interleaved(x: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


CHANGES: dict[str, Change] = {
    "add": lambda x: x + x,
    "add a number": lambda x: x + 0.1,
    "add a column": lambda x: x + x[:, 3:4],
    "add a row": lambda x: x + torch.full((VOCAB,), 0.3, dtype=x.dtype),
    "subtract": lambda x: x - x[:, :1],
    "subtract a number": lambda x: x - 0.1,
    "subtract from a number": lambda x: 1.7 - x,
    "multiply": lambda x: x * x,
    "multiply by a number": lambda x: x * 0.1,
    "multiply by a constant": lambda x: x * torch.tensor(0.1, dtype=x.dtype),
    "multiply by a constant of another dtype": lambda x: x * torch.tensor(0.1),
    "multiply by something wider": lambda x: x * x.float(),
    "divide": lambda x: x / (x * x + 1),
    "divide by a number": lambda x: x / 3,
    "divide a number": lambda x: 3 / (x * x + 1),
    "negate": lambda x: -x,
    "absolute": lambda x: x.abs(),
    "square": lambda x: x**2,
    "add a constant": lambda x: x + torch.tensor(0.1, dtype=x.dtype),
    "add something wider": lambda x: x + x.float() * 0.1,
    "inverse": lambda x: (x * x + 1).reciprocal(),
    "subnormal": lambda x: x * 1e-38 * 0.1,
    "overflow": lambda x: x * 3e38 * 100,
    "to float16 and back": lambda x: x.half().to(x.dtype),
    "to float32": lambda x: x.float() * 0.1,
    "whole numbers": lambda x: x.float() * torch.full((1, VOCAB), 1001, dtype=torch.int64),
    "magnitude of whole numbers": lambda x: (
        x.float() * (torch.full((1, VOCAB), 7, dtype=torch.int64) - 1001).abs()
    ),
    "zeros of both signs": lambda x: torch.cat((x * torch.tensor(0.0), x * torch.tensor(-0.0)), -1),
    "heads": lambda x: (heads(x) * heads(x)[:, :1]).transpose(1, 2).reshape(x.shape),
    "heads, copied": lambda x: (heads(x).contiguous() + 1).transpose(1, 2).reshape(x.shape),
    "halves": lambda x: torch.cat((-x[:, 20:], x[:, :20]), dim=-1),
    "interleaved": lambda x: x * 0.5 + interleaved(x),
    "more columns": lambda x: torch.nn.functional.pad(x, (3, 2), value=0.7),
    "repeated": lambda x: x.repeat(1, 3),
    "rounded in places": lambda x: torch.cat((x[:, :7], x[:, 7:].half()), -1),
    "in place": lambda x: (x + 1).mul_(0.1).add_(x).div_(3),
    "filled": lambda x: (torch.zeros_like(x) + x).copy_(x * 2),
    "composite": lambda x: torch.nn.functional.dropout(x, 0.1, training=False).type_as(x).clone(),
}


def check(change: Change, dtype: str, level: str) -> None:
    """Replayed and eager, with a change of the logits in a dtype."""
    kernels = library.load(level)
    kernels.set_num_threads(2)
    model, graph = SmallModel(native_ops(kernels), "float32"), NativeStepGraph(kernels)

    def step(batch: ForwardBatch) -> Tensor:
        return change(model(batch).to(getattr(torch, dtype))).float()

    with torch.inference_mode():
        graph.capture(step, NEED)
        for seed, lengths in enumerate(BATCHES):
            batch = make_batch(lengths, seed=seed)
            expected = step(batch).clone()
            assert bits_equal(graph.replay(batch), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CHANGES)
def test_bits_are_torchs(name: str, dtype: str) -> None:
    check(CHANGES[name], dtype, library.isa())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", library.levels()[1:])
def test_bits_are_torchs_on_other_machines(level: str, dtype: str) -> None:
    check(lambda x: torch.cat([f(x).float() for f in CHANGES.values()], -1), dtype, level)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("add or mul", lambda x: x * 2 if x.shape[0] == 1 else x + 1),
        ("mul or neg", lambda x: (x if x.shape[0] == 1 else -x) * 2),
        ("calls", lambda x: x if x.shape[0] == 1 else x * 2),
    ],
)
def test_a_single_row_that_is_computed_in_another_way_is_found_out(
    words: str, change: Change
) -> None:
    kernels = library.load(library.isa())
    model, graph = SmallModel(native_ops(kernels), "float32"), NativeStepGraph(kernels)
    with torch.inference_mode(), pytest.raises(CaptureRefused, match=f"a single row is .*{words}"):
        graph.capture(lambda batch: change(model(batch)), NEED)


def test_rows_of_tables_and_lists() -> None:
    kernels = library.load(library.isa())
    model, graph = SmallModel(native_ops(kernels), "float32"), NativeStepGraph(kernels)
    types = torch.arange(100).remainder(3).unsqueeze(0)

    def step(batch: ForwardBatch) -> Tensor:
        ids = torch.gather(types.expand(1, 100), 1, batch.positions.unsqueeze(0)) + 2
        states = torch.nn.functional.embedding(ids, model.embed)[0]
        rows: Tensor = model.ops["embedding"](batch.logits_rows, states)
        return rows + model(batch)[:, :1]

    with torch.inference_mode():
        graph.capture(step, NEED)
        for lengths in BATCHES:
            batch = make_batch(lengths)
            assert bits_equal(graph.replay(batch), step(batch))


KEPT = torch.ones(VOCAB)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("cumsum", lambda x: x.cumsum(-1)),
        ("exp", lambda x: x.exp()),
        ("sum", lambda x: x + x.sum(-1, keepdim=True)),
        (r"add.Tensor with \[2", lambda x: torch.add(x, x, alpha=2.0)),
        (r"mode with \['floor'\]", lambda x: torch.div(x, 3, rounding_mode="floor")),
        ("pow", lambda x: x.pow(3)),
        ("rsqrt", lambda x: (x * x + 1).rsqrt()),
        ("outlives the step", lambda x: x + KEPT.mul_(2)),
        ("neg.out", lambda x: torch.neg(x, out=torch.empty_like(x))),
        ("pow", lambda x: x.pow(torch.tensor(2.0))),
        ("9007199254740993", lambda x: x * torch.full((1, VOCAB), 9007199254740993)),
        (
            "embedding",
            lambda x: torch.nn.functional.embedding(
                torch.full((1, VOCAB), 1), x[:1, :1].expand(3, 5)
            ),
        ),
        ("int64 that gives", lambda x: x.half() * torch.full((1, VOCAB), 1001)),
        ("float32 that gives", lambda x: x.half() + torch.tensor(0.1)),
        ("gives torch.int32", lambda x: x + x.int() * 1.0),
        ("dimensions", lambda x: x.view(-1, 2, 2, 2, 5).permute(4, 3, 2, 1, 0).contiguous()),
    ],
)
def test_what_is_refused(words: str, change: Change) -> None:
    kernels = library.load(library.isa())
    model, graph = SmallModel(native_ops(kernels), "float32"), NativeStepGraph(kernels)
    with torch.inference_mode(), pytest.raises(CaptureRefused, match=words):
        graph.capture(lambda batch: change(model(batch)), NEED)
