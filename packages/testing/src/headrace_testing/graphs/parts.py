"""The tests that an implementation of steps in parts inherits.

Inherit from :class:`PartsConformance` as from :class:`~headrace_testing.graphs.steps.StepGraphConformance`.
The step is an encoder's: an embedding of words and one of segments, attention in both directions without
a cache, an MLP, norms; it ends with the states of all rows or of some.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import ReplayFailed
from headrace_core.graph import GraphNeed, StepGraph
from headrace_core.ops import CapturesSteps, KernelNeed, KernelProvider
from headrace_testing.graphs.steps import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, VOCAB, make_batch
from headrace_testing.ops import bits_equal, rand

LENGTHS = (14, 13, 11, 9, 7, 5, 3, 2, 1, 1)
CUTS: Sequence[Sequence[int]] = ([0, 3, 10], [0, 1, 2, 3, 5, 7, 10], list(range(11)))
NEED = GraphNeed((8, 80), max_num_seqs=16, num_groups=0, parts=True)
"""Parts may have 40 tokens if there are two lanes."""


class SmallEncoder:
    """A step over the ops of one provider.

    Args:
        all_rows: it ends with all states, else with those of ``logits_rows``.
        token_types: it takes segments.
    """

    def __init__(self, ops: Any, dtype: str, *, all_rows: bool, token_types: bool = False) -> None:
        self.ops, self.all_rows, self.token_types = ops, all_rows, token_types

        def weight(*shape: int, seed: int) -> Tensor:
            return rand(*shape, dtype=dtype, seed=seed).mul_(shape[-1] ** -0.5)

        size = HEADS * HEAD_DIM
        self.embed, self.types = weight(VOCAB, HIDDEN, seed=1), weight(2, HIDDEN, seed=2)
        self.norm = weight(HIDDEN, seed=3)
        self.qkv = ops["linear"].pack(weight(3 * size, HIDDEN, seed=4))
        self.out = ops["linear"].pack(weight(HIDDEN, size, seed=5))
        self.up = ops["linear"].pack(weight(INTERMEDIATE, HIDDEN, seed=6))
        self.down = ops["linear"].pack(weight(HIDDEN, INTERMEDIATE, seed=7))

    def __call__(self, batch: ForwardBatch) -> Tensor:
        ops = self.ops
        x = ops["embedding"](batch.input_ids, self.embed)
        if batch.token_type_ids is not None:
            x = ops["add"](x, ops["embedding"](batch.token_type_ids, self.types))
        for _ in range(2):
            x = ops["rms_norm"](ops["add"](x, self._attention(x, batch)), self.norm, 1e-6)
            inner = ops["linear"].activated(x, self.up, "gelu")
            x = ops["rms_norm"](ops["add"](x, ops["linear"](inner, self.down)), self.norm, 1e-6)
        if not self.all_rows:
            x = ops["embedding"](batch.logits_rows, x)
        result: Tensor = x
        return result

    def _attention(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        heads = self.ops["linear"](x, self.qkv).view(x.shape[0], -1, HEAD_DIM)
        query, key, value = heads.split([HEADS, HEADS, HEADS], dim=1)
        out = self.ops["varlen_attention"](
            query, key, value, batch.cu_seqlens_q,
            max_seqlen=batch.max_seqlen_q, scale=HEAD_DIM**-0.5, sliding_window=4,
        )  # fmt: skip
        projected: Tensor = self.ops["linear"](out.flatten(1), self.out)
        return projected

    def batch(self, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> ForwardBatch:
        """A step of prompts of so many tokens."""
        batch = make_batch([(n, n) for n in lengths], num_groups=0, seed=seed)
        types = torch.randint(2, batch.input_ids.shape) if self.token_types else None
        rows = None if self.all_rows else batch.cu_seqlens_q[:-1].long()
        return dataclasses.replace(batch, token_type_ids=types, logits_rows=rows)

    def need(self) -> GraphNeed:
        """Steps to capture."""
        return dataclasses.replace(NEED, all_rows=self.all_rows, token_types=self.token_types)


class PartsConformance:
    """Conformance suite of steps in parts; see the module's docstring."""

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["all-bfloat16", "all-types-float32", "first-bfloat16"])
    def made(
        self, request: pytest.FixtureRequest, provider: KernelProvider
    ) -> tuple[SmallEncoder, StepGraph]:
        """A model and a graph of its step."""
        *kinds, dtype = request.param.split("-")
        assert isinstance(provider, CapturesSteps)
        operations = provider.operations(KernelNeed("cpu", dtype))
        model = SmallEncoder(
            operations, dtype, all_rows="all" in kinds, token_types="types" in kinds
        )
        graph = provider.step_graph(operations)
        graph.capture(model, model.need())
        return model, graph

    def test_there_are_lanes(self, made: tuple[SmallEncoder, StepGraph]) -> None:
        _, graph = made
        assert graph.lanes > 1
        assert graph.part_tokens >= graph.buckets[-1] // graph.lanes

    @pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: f"{len(cuts) - 1}-parts")
    def test_parts_equal_the_whole(
        self, made: tuple[SmallEncoder, StepGraph], cuts: Sequence[int]
    ) -> None:
        model, graph = made
        for seed in range(3):
            batch = model.batch(seed=seed)
            assert graph.fits(batch)
            assert bits_equal(graph.replay_parts(batch, cuts, lambda: None), model(batch))

    def test_whole_steps_are_run_between(self, made: tuple[SmallEncoder, StepGraph]) -> None:
        model, graph = made
        for seed in range(3):
            batch = model.batch(seed=seed)
            expected = model(batch)
            assert bits_equal(graph.replay(batch), expected)
            assert bits_equal(graph.replay_parts(batch, CUTS[1], lambda: None), expected)

    def test_a_result_lasts_while_the_next_step_runs(
        self, made: tuple[SmallEncoder, StepGraph]
    ) -> None:
        model, graph = made
        first, second = model.batch(seed=1), model.batch(seed=2)
        result = graph.replay_parts(first, CUTS[1], lambda: None)
        graph.replay_parts(second, CUTS[1], lambda: None)
        assert bits_equal(result, model(first))

    def test_meanwhile_is_called_once_in_this_thread_and_may_compute(
        self, made: tuple[SmallEncoder, StepGraph]
    ) -> None:
        model, graph = made
        batch, other = model.batch(seed=1), model.batch(seed=2)
        seen: list[Any] = []
        expected = model(other)

        def meanwhile() -> None:
            seen.append((threading.get_ident(), bits_equal(model(other), expected)))

        result = graph.replay_parts(batch, CUTS[2], meanwhile)
        assert seen == [(threading.get_ident(), True)]
        assert bits_equal(result, model(batch))

    def test_what_meanwhile_raises_leaves_the_graph_usable(
        self, made: tuple[SmallEncoder, StepGraph]
    ) -> None:
        model, graph = made

        def meanwhile() -> None:
            raise LookupError("on the way")

        with pytest.raises(LookupError, match="on the way"):
            graph.replay_parts(model.batch(), CUTS[2], meanwhile)
        batch = model.batch(seed=4)
        assert bits_equal(graph.replay_parts(batch, CUTS[2], lambda: None), model(batch))

    def test_a_part_that_is_too_long_is_refused(self, made: tuple[SmallEncoder, StepGraph]) -> None:
        model, graph = made
        batch = model.batch([graph.part_tokens + 1, 1])
        with pytest.raises(ValueError, match=f"at most {graph.part_tokens}"):
            graph.replay_parts(batch, [0, 1, 2], lambda: None)

    def test_a_bad_index_fails_the_step_alone(self, made: tuple[SmallEncoder, StepGraph]) -> None:
        model, graph = made
        batch = model.batch()
        ids = batch.input_ids.clone()
        ids[-1] = VOCAB
        bad = dataclasses.replace(batch, input_ids=ids)
        with pytest.raises(ReplayFailed, match="embedding"):
            graph.replay_parts(bad, CUTS[2], lambda: None)
        assert bits_equal(graph.replay_parts(batch, CUTS[2], lambda: None), model(batch))
