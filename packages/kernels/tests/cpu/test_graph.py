"""Captured steps of the native kernels on every instruction set, and what a capture refuses."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import CaptureRefused, ReplayFailed
from headrace_core.graph import GraphNeed
from headrace_core.ops import KernelNeed, KernelProvider, bind_ops
from headrace_kernels.cpu import library
from headrace_kernels.cpu.graph import NativeStepGraph
from headrace_kernels.cpu.graph_program import Argument, Term, place_blocks, result_is_apart
from headrace_kernels.cpu.graph_values import LOGITS, SEQS, TOKENS
from headrace_kernels.cpu.ops import native_ops
from headrace_kernels.cpu.provider import CPUProvider
from headrace_testing.graphs.encoders import EncoderStepConformance
from headrace_testing.graphs.parts import PartsConformance, SmallEncoder
from headrace_testing.graphs.states import StateStepConformance
from headrace_testing.graphs.steps import (
    NUM_GROUPS,
    SmallModel,
    StepGraphConformance,
    make_batch,
)
from headrace_testing.ops import bits_equal
from headrace_testing.ops.optional.low_rank import Adapters
from headrace_testing.ops.weights import KINDS

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

NEED = GraphNeed((16,), max_num_seqs=8, num_groups=NUM_GROUPS)


class AtLevel(CPUProvider):
    """The provider as it is on a machine whose best instruction set is ``level``."""

    def __init__(self, level: str) -> None:
        self.level = level

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        kernels = library.load(self.level)
        kernels.set_num_threads(2)
        return native_ops(kernels)


class EveryLevel:
    """A conformance suite on each instruction set that this machine has."""

    @pytest.fixture(params=library.ISA_LEVELS)
    def provider(self, request: pytest.FixtureRequest) -> KernelProvider:
        if request.param not in library.levels():
            pytest.skip(f"this machine has no {request.param}")
        return AtLevel(request.param)


class TestNative(EveryLevel, StepGraphConformance): ...


class TestNativeEncoders(EveryLevel, EncoderStepConformance): ...


class TestNativeStates(EveryLevel, StateStepConformance): ...


class TestNativeParts(EveryLevel, PartsConformance): ...


class TestRecorders:
    """Calls of another library than the ops': here the same kernels, loaded again."""

    def test_their_calls_are_recorded(self) -> None:
        ops, others = (native_ops(library.load(library.isa())) for _ in range(2))
        model = SmallModel(ops, "float32")

        def step(batch: ForwardBatch) -> Tensor:
            result: Tensor = others["scale"](model(batch), 0.5)
            return result

        graph = CPUProvider().step_graph(ops)
        graph.capture(model, NEED)
        alone = graph.num_calls
        graph.capture(step, dataclasses.replace(NEED, recorders=(others.library,)))
        assert graph.num_calls == alone + 1
        for seed, lengths in enumerate(([(1, 5), (1, 9)], [(7, 7)], [(5, 5), (1, 12)])):
            batch = make_batch(lengths, seed=seed)
            before = model.caches.clone()
            expected = step(batch).clone()
            model.caches.copy_(before)
            assert bits_equal(graph.replay(batch), expected)

    def test_steps_with_them_have_no_parts(self) -> None:
        ops, others = (native_ops(library.load(library.isa())) for _ in range(2))
        ops.library.set_num_threads(2)
        model, graph = SmallEncoder(ops, "float32", all_rows=True), CPUProvider().step_graph(ops)
        graph.capture(model, model.need())
        assert graph.lanes == 2
        graph.capture(model, dataclasses.replace(model.need(), recorders=(others.library,)))
        assert graph.lanes == 1


@pytest.fixture
def kernels():
    kernels = library.load(library.isa())
    before = kernels.num_threads()
    yield kernels
    kernels.set_num_threads(before)


def encoder_graph(kernels, threads, **need):
    kernels.set_num_threads(threads)
    model = SmallEncoder(native_ops(kernels), "bfloat16", all_rows=True)
    graph = NativeStepGraph(kernels)
    graph.capture(model, dataclasses.replace(model.need(), **need))
    return model, graph


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 13), min_size=2, max_size=12),
    threads=st.integers(2, 5),
    data=st.data(),
)
def test_any_division_gives_the_same_bits(kernels, lengths, threads, data):
    model, graph = encoder_graph(kernels, threads, capture_sizes=(160,))
    inner = data.draw(st.sets(st.integers(1, len(lengths) - 1)))
    cuts = [0, *sorted(inner), len(lengths)]
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    if any(ends[b] - ends[a] > graph.part_tokens for a, b in pairwise(cuts)):
        return
    batch = model.batch(lengths)
    kernels.set_num_threads(data.draw(st.integers(1, 7)))  # more threads than lanes do no harm
    assert bits_equal(graph.replay_parts(batch, cuts, lambda: None), model(batch))


def test_no_lanes_for_one_thread_nor_if_nobody_asked(kernels):
    assert encoder_graph(kernels, 1)[1].lanes == 1
    model, graph = encoder_graph(kernels, 2, parts=False)
    assert (graph.lanes, graph.part_tokens) == (1, 0)
    batch, called = model.batch(), []
    result = graph.replay_parts(batch, [0, 2, 10], lambda: called.append(1))
    assert bits_equal(result, model(batch))
    assert called == [1]


def test_a_result_within_another_block_is_not_apart(captured):
    program = captured[1]._program
    assert result_is_apart(program, LOGITS)
    assert not result_is_apart(program, TOKENS)
    inner = Argument(Term(None, 0, 64), block=program.result.block)
    assert not result_is_apart(dataclasses.replace(program, result=inner), LOGITS)
    wider = dataclasses.replace(program, result_width=program.result_width // 2)
    assert not result_is_apart(wider, LOGITS)


def test_lanes_lie_in_the_buckets_memory(kernels):
    whole = encoder_graph(kernels, 1)[1]
    model, graph = encoder_graph(kernels, 2)
    results = 2 * 80 * model.embed.shape[1] * 2
    assert graph.num_bytes <= 1.3 * whole.num_bytes + results


def make() -> tuple[SmallModel, NativeStepGraph, library.Library]:
    kernels = library.load(library.isa())
    model = SmallModel(native_ops(kernels), "bfloat16")
    return model, NativeStepGraph(kernels), kernels


@pytest.fixture(scope="module")
def captured() -> tuple[SmallModel, NativeStepGraph]:
    model, graph, _ = make()
    graph.capture(model, GraphNeed((3, 16, 40), max_num_seqs=12, num_groups=NUM_GROUPS))
    return model, graph


def test_a_replay_tells_how_long_each_call_took(captured):
    _, graph = captured
    batch = make_batch([(1, 5)], seed=1)
    batch = dataclasses.replace(batch, logits_rows=torch.arange(1))
    expected = graph.replay(batch).clone()
    calls = graph.call_times(batch)
    assert {"embedding", "linear", "paged_attention"} < {name for name, _ in calls}
    assert len(calls) == graph.num_calls
    assert all(0 <= nanoseconds < 10**12 for _, nanoseconds in calls)
    assert bits_equal(graph.replay(batch), expected)


class Quantized:
    """A linear op over packed weights of one kind after the other."""

    def __init__(self, ops: Mapping[str, Any]) -> None:
        self.op = ops["quant_linear"]
        self.kinds = itertools.cycle(["q4_k", "fp8-128", "nf4", "int8"])

    def pack(self, weight: torch.Tensor) -> Any:
        drawn = KINDS[next(self.kinds)].draw(*weight.shape)
        return self.op.pack(drawn, "bfloat16", activations="float")

    def __call__(self, *arguments: Any) -> torch.Tensor:
        return self.op(*arguments)

    def gated(self, *arguments: Any) -> torch.Tensor:
        return self.op.gated(*arguments)


def test_steps_of_packed_weights_replay_to_the_same_bits():
    kernels = library.load(library.isa())
    ops = native_ops(kernels)
    model = SmallModel({**ops, "linear": Quantized(ops)}, "bfloat16")
    graph = NativeStepGraph(kernels)
    graph.capture(model, GraphNeed((3, 16), max_num_seqs=12, num_groups=NUM_GROUPS))
    for lengths in ([(1, 5)], [(1, 9), (7, 12), (2, 2)]):
        batch = make_batch(lengths, seed=1)
        batch = dataclasses.replace(batch, logits_rows=torch.arange(len(lengths)))
        assert graph.fits(batch)
        StepGraphConformance().check_same(model, graph, batch)


class Adapted:
    """A linear op to whose results adapters add, of slots in memory that steps share."""

    def __init__(self, ops: Mapping[str, Any]) -> None:
        self.op, self.low_rank = ops["linear"], ops["low_rank"]
        self.slots = torch.full((40,), -1, dtype=torch.int32)
        self.layers: list[tuple[Any, Adapters, Any]] = []

    def pack(self, weight: torch.Tensor) -> Any:
        packed = self.op.pack(weight)
        adapters = Adapters(weight.shape[1], (weight.shape[0],), 2, "bfloat16", "cpu")
        adapters.draw(1, 0, 9, seed=len(self.layers))
        self.layers.append((packed, adapters, adapters.written(self.low_rank)))
        return packed

    def __call__(self, x: torch.Tensor, packed: Any, *bias: Any) -> torch.Tensor:
        [memory] = [memory for own, _, memory in self.layers if own is packed]
        return self.low_rank(self.op(x, packed, *bias), x, memory, self.slots)

    def gated(self, *arguments: Any) -> torch.Tensor:
        return self.op.gated(*arguments)


def test_adapters_are_those_of_the_step_and_not_of_the_recording():
    """Slots, and what is in them, are read as the step is replayed."""
    kernels = library.load(library.isa())
    ops = native_ops(kernels)
    linear = Adapted(ops)
    model, graph = SmallModel({**ops, "linear": linear}, "bfloat16"), NativeStepGraph(kernels)
    graph.capture(model, GraphNeed((3, 16), max_num_seqs=12, num_groups=NUM_GROUPS))
    batch = make_batch([(1, 9), (7, 12), (2, 2)], seed=1)
    batch = dataclasses.replace(batch, logits_rows=torch.arange(3))
    base = graph.replay(batch).clone()
    linear.slots[1:8] = 1
    StepGraphConformance().check_same(model, graph, batch)
    adapted = graph.replay(batch).clone()
    assert bits_equal(adapted[0], base[0])
    assert not bits_equal(adapted[1], base[1])
    for _, adapters, memory in linear.layers:
        adapters.draw(1, 0, 3, seed=99)
        linear.low_rank.write(memory, 1, 0, *adapters.factors[1, 0])
    StepGraphConformance().check_same(model, graph, batch)
    assert not bits_equal(graph.replay(batch)[1], adapted[1])
    linear.slots[1] = 2
    with pytest.raises(ReplayFailed):
        graph.replay(batch)


REQUESTS = st.tuples(st.integers(1, 12), st.integers(0, 8)).map(lambda r: (r[0], r[0] + r[1]))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=st.lists(REQUESTS, min_size=1, max_size=12), seed=st.integers(0, 99), data=st.data())
def test_any_batch_replays_to_the_same_bits(captured, lengths, seed, data):
    model, graph = captured
    batch = make_batch(lengths, seed=seed)
    rows = data.draw(st.permutations(range(batch.num_tokens)))[: data.draw(st.integers(1, 12))]
    batch = dataclasses.replace(batch, logits_rows=torch.tensor(rows))
    if batch.num_tokens > 40:
        assert not graph.fits(batch)
    elif graph.fits(batch):
        StepGraphConformance().check_same(model, graph, batch)
    else:
        assert len(rows) > min(12, *(size for size in graph.buckets if size >= batch.num_tokens))


def test_inputs_are_read_where_they_are(captured):
    """Tables may be slices of wider ones; nothing of an earlier step is remembered."""
    model, graph = captured
    batch = make_batch([(2, 9), (1, 30)])
    expected = model(batch).clone()
    groups = []
    for group in batch.groups:
        wide = torch.full((2, 50), 99, dtype=torch.int32)
        wide[:, : group.block_table.shape[1]] = group.block_table
        groups.append(dataclasses.replace(group, block_table=wide[:, : group.block_table.shape[1]]))
    moved = dataclasses.replace(
        batch, groups=tuple(groups), input_ids=batch.input_ids.clone(), seq_lens=batch.seq_lens + 0
    )
    assert bits_equal(graph.replay(moved), expected)


def test_the_largest_bucket_bounds_the_memory(captured):
    _, graph = captured
    small = NativeStepGraph(make()[2])
    assert small.num_bytes == 0
    assert graph.num_bytes < 2 * sum(40 * 4 * width for width in (32, 96, 64, 48, 40))


def test_blocks_that_live_at_once_do_not_overlap(captured):
    _, graph = captured
    limits = {TOKENS: 40, SEQS: 12, LOGITS: 12}
    offsets, total = place_blocks(graph._program, limits)
    sizes = [t.offset + t.factor * limits[t.value] for t in graph._program.sizes]
    living: set[int] = set()
    for block, num_bytes in graph._program.events:
        if num_bytes < 0:
            living.remove(block)
            continue
        for other in living:
            assert (
                offsets[block] + sizes[block] <= offsets[other]
                or offsets[other] + sizes[other] <= offsets[block]
            )
        assert offsets[block] + sizes[block] <= total
        living.add(block)
    assert sum(sizes) > total, "memory is reused"


def _branches(model, batch):
    if batch.num_tokens == 1:
        model.ops["activation"](model.embed, "silu")
    return model(batch)


def _rounds_up(model, batch, kernels):
    x = torch.empty(64, 8)
    kernels.scale(x.data_ptr(), x.data_ptr(), -(-batch.num_tokens // 64), 8, 8, 1.0, 0)
    return model(batch)


def _allocates_by_context(model, batch, kernels):
    x = torch.empty(batch.max_seqlen_k, 8)
    kernels.scale(x.data_ptr(), x.data_ptr(), 1, 8, 8, 1.0, 0)
    return model(batch)


def _last_row(model, batch, kernels):
    x = torch.empty(batch.num_tokens, 8)
    kernels.scale(x.data_ptr(), x[-1].data_ptr(), 1, 8, 8, 1.0, 0)
    return model(batch)


def _fraction(model, batch, kernels):
    x = torch.empty(4, 8)
    kernels.scale(x.data_ptr(), x.data_ptr(), 1, 8, 8, 1.0 / batch.num_tokens, 0)
    return model(batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model, batch, kernels: _branches(model, batch), "activation or embedding"),
        (_rounds_up, "argument 2 of scale is"),
        (_allocates_by_context, "grows with what has no limit"),
        (_last_row, "argument 1 of scale begins at a row"),
        (_fraction, "argument 5 of scale is a fraction"),
        (lambda model, batch, kernels: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["branch", "rounded", "unbounded", "last-row", "fraction", "exception"],
)
def test_arguments_that_do_not_follow_from_sizes_are_refused(change, message):
    model, graph, kernels = make()
    with pytest.raises(CaptureRefused, match=message):
        graph.capture(lambda batch: change(model, batch, kernels), NEED)


def test_bound_ops_bring_their_graph():
    table = bind_ops(KernelNeed("cpu", "float32"))
    assert table.step_graph is not None
    assert isinstance(table.step_graph(), NativeStepGraph)
    assert bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"}).step_graph is None
