"""A small step whose ranks talk, and what each rank does with it in a process of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import EngineError, ReplayFailed
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import CapturesSteps, KernelNeed
from headrace_core.parallel import Communicator
from headrace_kernels.cpu.provider import PROVIDER
from headrace_testing.graphs.steps import (
    COMPOSITIONS,
    HIDDEN,
    INTERMEDIATE,
    NUM_GROUPS,
    VOCAB,
    SmallModel,
    make_batch,
)
from headrace_testing.ops import rand

NEED = GraphNeed((4, 16), max_num_seqs=8, num_groups=NUM_GROUPS)


class SmallModelOfRanks(SmallModel):
    """Each rank has a part of the MLP's inner columns, whose products are summed, and of the vocabulary,
    whose logits are gathered."""

    def __init__(self, ops: Any, dtype: str, group: Communicator) -> None:
        super().__init__(ops, dtype)
        self.group = group
        down = rand(HIDDEN, INTERMEDIATE, dtype=dtype, seed=20 + group.rank)
        head = rand(VOCAB, HIDDEN, dtype=dtype, seed=30 + group.rank)
        self.down, self.head = ops["linear"].pack(down), ops["linear"].pack(head)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(super()._mlp(x))

    def __call__(self, batch: ForwardBatch) -> Tensor:
        return self.group.all_gather(super().__call__(batch))


def made(group: Communicator, dtype: str) -> tuple[SmallModelOfRanks, StepGraph]:
    """The model, and a graph that has recorded it."""
    provider: object = PROVIDER
    assert isinstance(provider, CapturesSteps)
    operations = PROVIDER.operations(KernelNeed("cpu", dtype, num_threads=1))
    model, graph = SmallModelOfRanks(operations, dtype, group), provider.step_graph(operations)
    graph.capture(model, dataclasses.replace(NEED, recorders=(group,)))  # type: ignore[arg-type]
    return model, graph


def eager_and_replayed(group: Communicator, dtype: str) -> list[tuple[Tensor, Tensor, bool]]:
    """Logits of both ways for steps of several sizes, and whether they left the same caches."""
    model, graph = made(group, dtype)
    results = []
    for seed, lengths in enumerate(COMPOSITIONS):
        batch = make_batch(lengths, seed=seed)
        before = model.caches.clone()
        expected, cached = model(batch).clone(), model.caches.clone()
        model.caches.copy_(before)
        assert graph.fits(batch)
        results.append((expected, graph.replay(batch).clone(), torch.equal(model.caches, cached)))
    return results


def replayed_until_alone(group: Communicator) -> tuple[str, str]:
    """Replay steps until one fails, and then run one eagerly: what each of the two said."""
    model, graph = made(group, "float32")
    batch = make_batch(COMPOSITIONS[0])
    try:
        while True:
            graph.replay(batch)
    except ReplayFailed as failed:
        first = str(failed)
    try:
        model(batch)
    except EngineError as lost:
        return first, f"{type(lost).__name__}: {lost}"
    return first, "nothing"


def capture_of_a_barrier(group: Communicator) -> str:
    """What is said of a step that cannot be recorded."""
    operations = PROVIDER.operations(KernelNeed("cpu", "float32", num_threads=1))
    model, graph = SmallModel(operations, "float32"), PROVIDER.step_graph(operations)

    def step(batch: ForwardBatch) -> Tensor:
        group.barrier()
        return model(batch)

    try:
        graph.capture(step, dataclasses.replace(NEED, recorders=(group,)))  # type: ignore[arg-type]
    except Exception as refused:
        return f"{type(refused).__name__}: {refused}"
    return "nothing"
