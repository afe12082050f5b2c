"""The tests that an implementation of captured steps inherits.

Inherit from :class:`StepGraphConformance` and give a kernel provider that captures steps::

    class TestMyGraph(StepGraphConformance):
        @pytest.fixture
        def provider(self):
            return PROVIDER

The step is a small model with what real ones have: an embedding, a fused projection, head norms and
rotation with the cache write, attention over pages of two cache groups, a gated MLP, a mixture of
experts, rows with logits, a soft cap.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import CaptureRefused, ReplayFailed
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import CapturesSteps, HeadNorm, KernelNeed, KernelProvider
from headrace_testing.ops import bits_equal, rand

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EXPERTS = 40, 32, 4, 2, 16, 24, 4
BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 64, 48
NUM_GROUPS = 2

COMPOSITIONS: Sequence[Sequence[tuple[int, int]]] = (
    [(1, 1)],
    [(1, 40)],
    [(7, 7)],
    [(1, 5), (1, 9), (1, 33)],
    [(5, 5), (1, 12), (3, 20), (1, 1)],
    [(1, 3)] * 8,
    [(11, 11), (5, 30)],
)
"""(new tokens, context length) of each request of a step."""


class SmallModel:
    """A step over the ops of one provider; ``caches`` [groups, 2, N, S, Hk, D]."""

    def __init__(self, ops: Any, dtype: str) -> None:
        self.ops = ops
        size = HEADS * HEAD_DIM

        def weight(*shape: int, seed: int) -> Tensor:
            return rand(*shape, dtype=dtype, seed=seed).mul_(shape[-1] ** -0.5)

        self.embed = weight(VOCAB, HIDDEN, seed=1)
        self.norm = weight(HIDDEN, seed=2)
        self.head_norm = HeadNorm(weight(HEAD_DIM, seed=3), weight(HEAD_DIM, seed=4), 1e-6)
        self.qkv = ops["linear"].pack(weight(size + 2 * KV_HEADS * HEAD_DIM, HIDDEN, seed=5))
        self.qkv_bias = weight(size + 2 * KV_HEADS * HEAD_DIM, seed=6)
        self.out = ops["linear"].pack(weight(HIDDEN, size, seed=7))
        self.gate_up = ops["linear"].pack(weight(2 * INTERMEDIATE, HIDDEN, seed=8))
        self.down = ops["linear"].pack(weight(HIDDEN, INTERMEDIATE, seed=9))
        self.router = ops["linear"].pack(weight(EXPERTS, HIDDEN, seed=10))
        self.experts = ops["moe"].pack(
            weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=11),
            weight(EXPERTS, HIDDEN, INTERMEDIATE, seed=12),
        )
        self.head = ops["linear"].pack(weight(VOCAB, HIDDEN, seed=13))
        self.cos_sin = rand(MAX_LEN, HEAD_DIM, seed=14)
        shape = (NUM_GROUPS, 2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = rand(*shape, dtype=dtype, seed=15)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ops = self.ops
        x = ops["scale"](ops["embedding"](batch.input_ids, self.embed), 3.0)
        x, residual = ops["rms_norm"](x, self.norm, 1e-6), x
        for group in range(NUM_GROUPS):
            x = self._attention(x, batch, group)
            x, residual = ops["add_rms_norm"](x, residual, self.norm, 1e-6)
            x = self._mlp(x) if group else self._moe(x)
        if batch.logits_rows is not None:
            x = ops["embedding"](batch.logits_rows, ops["add"](x, residual))
        else:
            x = ops["add"](x, residual)
        result: Tensor = ops["to_float32"](ops["linear"](x, self.head), soft_cap=20.0)
        return result

    def _attention(self, x: Tensor, batch: ForwardBatch, group: int) -> Tensor:
        heads = self.ops["linear"](x, self.qkv, self.qkv_bias).view(x.shape[0], -1, HEAD_DIM)
        query, key, value = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        where, (keys, values) = batch.groups[group], self.caches[group]
        self.ops["rotary_cache_write"](
            query, key, value, batch.positions, self.cos_sin, keys, values, where.slot_mapping,
            head_norm=self.head_norm,
        )  # fmt: skip
        out = self.ops["paged_attention"](
            query, keys, values, where.block_table, batch.cu_seqlens_q, batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q, max_seqlen_k=batch.max_seqlen_k,
            scale=HEAD_DIM**-0.5, sliding_window=10 if group else None,
        )  # fmt: skip
        projected: Tensor = self.ops["linear"](out.flatten(1), self.out)
        return projected

    def _mlp(self, x: Tensor) -> Tensor:
        inner = self.ops["linear"].gated(x, self.gate_up, "silu")
        out: Tensor = self.ops["linear"](inner, self.down)
        return out

    def _moe(self, x: Tensor) -> Tensor:
        scores = self.ops["linear"](x, self.router)
        weights, ids = self.ops["route_experts"](scores, 2, renormalise=True)
        out: Tensor = self.ops["moe"](x, self.experts, weights, ids, "silu")
        return out


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    all_rows: bool = False,
    seed: int = 0,
    num_groups: int = NUM_GROUPS,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = NUM_BLOCKS,
    vocab_size: int = VOCAB,
) -> ForwardBatch:
    """A step of (new tokens, context length) requests over scattered blocks; logits of the last
    row of each request, or of all rows by ``logits_rows`` None."""
    generator = torch.Generator().manual_seed(seed)
    starts = [0]
    for num_new, _ in lengths:
        starts.append(starts[-1] + num_new)
    ranges = [range(length - num_new, length) for num_new, length in lengths]
    width = -(-max(length for _, length in lengths) // block_size)
    groups = []
    for _ in range(num_groups):
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        table = torch.zeros(len(lengths), width, dtype=torch.int32)
        slots = []
        for b, (_, length) in enumerate(lengths):
            for column in range(-(-length // block_size)):
                table[b, column] = free.pop()
            slots += [
                int(table[b, p // block_size]) * block_size + p % block_size for p in ranges[b]
            ]
        groups.append(GroupBatch(block_table=table, slot_mapping=torch.tensor(slots)))
    return ForwardBatch(
        input_ids=torch.randint(vocab_size, (starts[-1],), generator=generator),
        positions=torch.tensor([p for each in ranges for p in each]),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([length for _, length in lengths], dtype=torch.int32),
        max_seqlen_q=max(num_new for num_new, _ in lengths),
        max_seqlen_k=max(length for _, length in lengths),
        groups=tuple(groups),
        logits_rows=None if all_rows else torch.tensor(starts[1:]) - 1,
    )


def _size_of(batch: ForwardBatch) -> Tensor:
    """A tensor that Python made of a step's size."""
    return torch.tensor(float(len(batch.input_ids)))


class StepGraphConformance:
    """Conformance suite of captured steps; see the module's docstring."""

    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16")
    need: ClassVar[GraphNeed] = GraphNeed((4, 16), max_num_seqs=8, num_groups=NUM_GROUPS)

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16"])
    def made(
        self, request: pytest.FixtureRequest, provider: KernelProvider
    ) -> tuple[SmallModel, StepGraph]:
        """A model and an empty graph for it."""
        if request.param not in self.dtypes:
            pytest.skip(f"{request.param} is not among this class's dtypes")
        return self.make(provider, request.param)

    def make(self, provider: KernelProvider, dtype: str) -> tuple[SmallModel, StepGraph]:
        assert isinstance(provider, CapturesSteps)
        need = KernelNeed("cpu", dtype)
        reasons = provider.refuse(need)
        if reasons:
            pytest.skip(f"{provider.name} refuses: {'; '.join(reasons)}")
        operations = provider.operations(need)
        return SmallModel(operations, dtype), provider.step_graph(operations)

    def check_same(self, model: SmallModel, graph: StepGraph, batch: ForwardBatch) -> None:
        """Replayed and eager step give the same logits and leave the same caches, bit for bit."""
        before = model.caches.clone()
        expected, cached = model(batch).clone(), model.caches.clone()
        model.caches.copy_(before)
        assert graph.fits(batch)
        assert bits_equal(graph.replay(batch), expected)
        assert bits_equal(model.caches, cached)

    def test_replay_equals_eager(self, made: tuple[SmallModel, StepGraph]) -> None:
        model, graph = made
        before = model.caches.clone()
        graph.capture(model, self.need)
        assert bits_equal(model.caches, before), "capturing writes to no cache"
        assert graph.buckets == self.need.capture_sizes
        assert graph.num_bytes > 0
        assert graph.num_calls > 0
        for seed, lengths in enumerate(COMPOSITIONS):
            self.check_same(model, graph, make_batch(lengths, seed=seed))
            if all(num_new == 1 for num_new, _ in lengths):
                self.check_same(model, graph, make_batch(lengths, all_rows=True, seed=seed))

    def test_an_eager_step_after_a_capture_still_computes(
        self, made: tuple[SmallModel, StepGraph]
    ) -> None:
        model, graph = made
        batch = make_batch(COMPOSITIONS[4])
        expected = model(batch).clone()
        graph.capture(model, self.need)
        assert bits_equal(model(batch), expected)

    def test_only_the_wanted_logits_are_computed(self, made: tuple[SmallModel, StepGraph]) -> None:
        model, graph = made
        graph.capture(model, self.need)
        batch = make_batch([(5, 5), (1, 12), (3, 20)])
        expected, cached = model(batch).clone(), model.caches.clone()
        assert bits_equal(graph.replay(batch, 2), expected[:2])
        model.caches.zero_()
        assert graph.replay(batch, 0).shape == (0, VOCAB)
        where = batch.groups[0].slot_mapping
        written, wanted = (c[0].flatten(1, 2)[:, where] for c in (model.caches, cached))
        assert bits_equal(written, wanted), "a step without logits fills the cache all the same"

    def test_batches_that_do_not_fit(self, made: tuple[SmallModel, StepGraph]) -> None:
        model, graph = made
        batch = make_batch([(16, 16)])
        assert not graph.fits(batch), "nothing is captured"
        graph.capture(model, self.need)
        assert graph.fits(batch)
        assert not graph.fits(make_batch([(17, 17)]))
        assert not graph.fits(dataclasses.replace(batch, groups=batch.groups[:1]))
        assert not graph.fits(dataclasses.replace(batch, extra={"media": 1}))
        assert not graph.fits(dataclasses.replace(batch, positions=batch.positions.int()))
        assert not graph.fits(dataclasses.replace(batch, positions=batch.positions[1:]))
        assert not graph.fits(dataclasses.replace(batch, cu_seqlens_q=batch.cu_seqlens_q[1:]))
        graph.close()
        graph.close()
        assert not graph.fits(batch)
        assert graph.buckets == ()

    def test_a_bad_index_fails_the_replay_alone(self, made: tuple[SmallModel, StepGraph]) -> None:
        model, graph = made
        graph.capture(model, self.need)
        batch = make_batch([(1, 5), (1, 9)])
        bad = dataclasses.replace(batch, input_ids=torch.tensor([0, VOCAB]))
        with pytest.raises(ReplayFailed, match="embedding"):
            graph.replay(bad)
        with pytest.raises(IndexError, match=f"outside \\[0, {VOCAB}\\)"):
            model(bad)
        self.check_same(model, graph, batch)

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("cumsum", lambda model, batch: model(batch).cumsum(-1)),
            ("index", lambda model, batch: model(batch)[batch.logits_rows]),
            ("lift_fresh|argument", lambda model, batch: model(batch) + _size_of(batch)),
            ("item|_local_scalar", lambda model, batch: model(batch)[: int(batch.seq_lens[0])]),
            ("resolve|list", lambda model, batch: model(batch)[: batch.seq_lens.tolist()[0]]),
            ("contiguous|clone|result", lambda model, batch: model(batch).T.contiguous().T),
            ("result", lambda model, batch: model(batch)[:1]),
        ],
        ids=["arithmetic", "gather", "constant", "item", "tolist", "copy", "rows"],
    )
    def test_what_cannot_be_recorded_is_refused_by_name(
        self, provider: KernelProvider, name: str, change: Callable[[Any, ForwardBatch], Tensor]
    ) -> None:
        model, graph = self.make(provider, "float32")
        with torch.inference_mode(), pytest.raises(CaptureRefused, match=name):
            graph.capture(lambda batch: change(model, batch), self.need)
        assert not graph.fits(make_batch([(1, 1)]))
        batch = make_batch(COMPOSITIONS[3])
        graph.capture(model, self.need)  # a refusal leaves nothing behind
        self.check_same(model, graph, batch)

    def test_two_graphs_on_two_threads(self, provider: KernelProvider) -> None:
        """One captures again and again while the other computes."""
        capturing, graph = self.make(provider, "float32")
        computing, _ = self.make(provider, "float32")
        batch = make_batch(COMPOSITIONS[4])
        expected, done = computing(batch).clone(), threading.Event()

        def capture() -> None:
            try:
                for _ in range(20):
                    graph.capture(capturing, self.need)
            finally:
                done.set()

        thread = threading.Thread(target=capture)
        thread.start()
        rounds = 0
        while not done.is_set() or rounds == 0:
            assert bits_equal(computing(batch), expected)
            rounds += 1
        thread.join()
        self.check_same(capturing, graph, batch)
