"""Which steps of a pooling model are replayed, and with which rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from pooling_stub import HIDDEN, Made, Tokens, make
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import GenerateError, ReplayFailed
from headrace_core.graph import GraphNeed, Step, StepGraph
from headrace_core.model import Rows
from headrace_core.pooling import PoolingParams
from headrace_engine.execution.capture import Capture
from headrace_engine.pooling.vectors import as_array


class Replaying(StepGraph):
    """Runs the step as it is, and notes whose rows were asked for."""

    def __init__(self, *, fails: bool = False) -> None:
        self.need = GraphNeed((), 0, 0)
        self.replayed: list[int | None] = []
        """Rows of each replay; None: all."""
        self._fails = fails

    buckets: Sequence[int] = (32,)  # type: ignore[assignment]
    num_bytes = num_calls = 0  # type: ignore[assignment]

    def capture(self, step: Step, need: GraphNeed) -> None:
        self.step, self.need = step, need

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        rows = batch.num_tokens if batch.logits_rows is None else len(batch.logits_rows)
        assert (batch.token_type_ids is not None) == self.need.token_types
        return batch.num_tokens <= 32 and (self.need.all_rows or rows <= self.need.max_num_seqs)

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        self.replayed.append(None if batch.logits_rows is None else len(batch.logits_rows))
        if self._fails:
            raise ReplayFailed("a slot beyond the cache")
        return self.step(batch)

    def close(self) -> None: ...


def embedded(graph: Replaying, task: str = "embed", **settings: Any) -> list[int | None]:
    made = make(capture=Capture(lambda: lambda: graph, (32,)), max_num_seqs=4, **settings)
    texts = ["abc", "d" * 20, "e" * 50]
    with made.offline() as llm:
        for text in texts:
            (output,) = llm.encode([text], PoolingParams(), task=task)
            found = torch.from_numpy(as_array(output.outputs.data).copy())
            want = made.model.dense(Tokens().encode(text), task=task)
            torch.testing.assert_close(found, want)
    return graph.replayed


@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_what_needs_all_rows_gets_all(task: str) -> None:
    graph = Replaying()
    assert embedded(graph, task, info={"token_types": True}) == [None, None]
    assert (graph.need.all_rows, graph.need.token_types, graph.need.num_groups) == (True, True, 0)


def test_what_needs_one_row_gets_one() -> None:
    graph = Replaying()
    assert embedded(graph, causal=True) == [1, 1]
    assert (graph.need.all_rows, graph.need.num_groups) == (False, 1)
    assert embedded(Replaying(), "token_embed", causal=True) == []  # more rows than were recorded


def test_a_replay_that_fails_is_run_eagerly() -> None:
    assert embedded(Replaying(fails=True)) == [None, None]


class InParts(Replaying):
    """Has lanes, and notes how steps were divided."""

    lanes, part_tokens = 2, 512  # type: ignore[assignment]
    buckets = (1024,)

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(fails=fails)
        self.parts: list[list[int]] = []
        """Tokens of each part of each step."""
        self.counts: list[list[int]] = []
        """Tokens of each request of each step."""
        self.owners: list[list[int]] = []
        """Whose rows were wanted, as indices of requests, of each step that ends with chosen ones."""
        self.results = torch.zeros(2, 1024, HIDDEN)

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        return True

    def replay_parts(
        self, batch: ForwardBatch, cuts: Sequence[int], meanwhile: Callable[[], None]
    ) -> Tensor:
        bounds = batch.cu_seqlens_q[list(cuts)]
        self.parts.append(bounds.diff().tolist())
        self.counts.append(batch.cu_seqlens_q.diff().tolist())
        if not self.need.all_rows:
            rows = (
                torch.arange(batch.num_tokens) if batch.logits_rows is None else batch.logits_rows
            )
            ends = batch.cu_seqlens_q[1:].long()
            self.owners.append(torch.bucketize(rows, ends, right=True).tolist())
        meanwhile()
        if self._fails:
            raise ReplayFailed("a slot beyond the cache")
        self.results = self.results.flip(0)  # written in turn, as the contract says
        hidden = self.step(batch)
        self.results[0, : len(hidden)] = hidden
        return self.results[0, : len(hidden)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("task", ["embed", "token_embed"])
def test_full_steps_are_run_in_parts(task: str, fails: bool) -> None:
    graph = InParts(fails=fails)
    made = make(
        capture=Capture(lambda: lambda: graph, (1024,)),
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        max_model_len=128,
    )
    texts = [chr(97 + i % 26) * (3 + 37 * i % 101) for i in range(60)]
    with made.offline() as llm:
        outputs = llm.encode(texts, PoolingParams(), task=task)
        assert graph.need.parts
    for text, output in zip(texts, outputs, strict=True):
        found = torch.from_numpy(as_array(output.outputs.data).copy())
        torch.testing.assert_close(found, made.model.dense(Tokens().encode(text), task=task))
    assert len(graph.parts) > 1
    assert all(len(parts) > 2 and max(parts) <= 512 for parts in graph.parts)
    assert all(counts == sorted(counts, reverse=True) for counts in graph.counts), "longest first"


def test_small_steps_are_not_divided() -> None:
    graph = InParts()
    assert embedded(graph) == [None, None, None]
    assert graph.parts == []


def last_rows(graph: InParts) -> Made:
    """An engine whose model's first task is made of each prompt's last row."""
    return make(
        capture=Capture(lambda: lambda: graph, (1024,)),
        info={"pooling_type": "LAST"},
        max_num_batched_tokens=1024,
        max_num_seqs=1024,
        max_model_len=128,
    )


@pytest.mark.parametrize(("task", "divided"), [("embed", True), ("token_embed", False)])
def test_all_rows_of_a_graph_for_chosen_ones_are_not_computed_in_parts(
    task: str, divided: bool
) -> None:
    graph = InParts()
    made = last_rows(graph)
    texts = [chr(97 + i % 26) * (20 + i % 30) for i in range(25)]
    with made.offline() as llm:
        outputs = llm.encode(texts, PoolingParams(), task=task)
    for text, output in zip(texts, outputs, strict=True):
        found = torch.from_numpy(as_array(output.outputs.data).copy())
        torch.testing.assert_close(found, made.model.dense(Tokens().encode(text), task=task))
    assert not graph.need.all_rows
    assert bool(graph.parts) == divided
    assert all(owners == list(range(len(owners))) for owners in graph.owners)


def test_two_rows_of_one_request_do_not_stand_for_one_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = InParts()
    made = last_rows(graph)

    def rows(params: PoolingParams) -> Rows:
        if params.num_left_out == 2:
            raise ValueError("cannot be pooled")
        return "all" if params.num_left_out == 1 else "last"

    monkeypatch.setattr(made.model.pooler, "rows", rows)
    texts = ["a" * 60, *["b" * 40] * 15, ""]
    params = [PoolingParams(num_left_out=2), *[PoolingParams() for _ in texts[2:]]]
    params.append(PoolingParams(num_left_out=1))  # of an empty text's two tokens
    with made.offline() as llm, pytest.raises(GenerateError, match="cannot be pooled"):
        llm.encode(texts, params, task="embed")
    assert graph.owners == []
