"""Which steps are replayed, which run eagerly, and what the log says of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import CaptureRefused, ReplayFailed
from headrace_core.graph import GraphNeed, Step, StepGraph
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import capture_sizes
from headrace_engine.execution.capture import Capture, capture_steps
from headrace_engine.worker.recording import captured_bytes
from headrace_engine.worker.settings import WorkerLimits


class FakeGraph(StepGraph):
    """Remembers the step and runs it again, as a recording would."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.step: Step | None = None
        self.need: GraphNeed | None = None
        self.replayed: list[tuple[int, int | None]] = []
        self.failing = False
        self.closed = False

    @property
    def buckets(self) -> tuple[int, ...]:
        return () if self.need is None else self.need.capture_sizes

    @property
    def num_bytes(self) -> int:
        return 3 << 20

    @property
    def num_calls(self) -> int:
        return 7

    def capture(self, step: Step, need: GraphNeed) -> None:
        if self.refusal is not None:
            raise CaptureRefused(self.refusal)
        self.step, self.need = step, need

    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        return batch.num_tokens <= self.buckets[-1]

    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        self.replayed.append((batch.num_tokens, num_logits))
        if self.failing:
            raise ReplayFailed("call 3, embedding, reported status 1")
        assert self.step is not None
        return self.step(batch)[:num_logits]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def graph() -> FakeGraph:
    return FakeGraph()


@pytest.fixture
def harness(tiny: Any, graph: FakeGraph) -> Any:
    made = tiny.Harness(tiny.LM(), capture=Capture(lambda: lambda: graph, (8,)))
    made.worker.warm_up()
    return made


def test_warm_up_captures_what_the_worker_can_run(harness: Any, graph: FakeGraph) -> None:
    assert graph.need == GraphNeed((8,), max_num_seqs=16, num_groups=1, device="cpu")


def test_steps_that_fit_are_replayed(harness: Any, graph: FakeGraph) -> None:
    tokens = harness.generate(harness.new("a", [1, 2, 3, 4, 5]), 6)
    assert tokens == harness.model.dense_greedy([1, 2, 3, 4, 5], 6)
    assert graph.replayed == [(5, 1), *[(1, 1)] * 5]


def test_larger_steps_run_eagerly(harness: Any, graph: FakeGraph) -> None:
    harness.step({"a": 9}, [harness.new("a", list(range(9)))])
    assert graph.replayed == []


def test_a_chunk_without_logits_asks_for_none(harness: Any, graph: FakeGraph) -> None:
    result = harness.step({"a": 4}, [harness.new("a", list(range(9)), first=4)])
    assert graph.replayed == [(4, 0)]
    assert result.requests["a"].token_ids == []


def test_prompt_logprobs_run_eagerly(harness: Any, graph: FakeGraph) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    result = harness.step({"a": 3}, [harness.new("a", [1, 2, 3], params)])
    assert graph.replayed == []
    assert len(result.requests["a"].prompt_logprobs) == 2


def test_a_failed_replay_runs_again_eagerly(
    harness: Any, graph: FakeGraph, caplog: pytest.LogCaptureFixture
) -> None:
    graph.failing = True
    tokens = harness.generate(harness.new("a", [1, 2, 3]), 2)
    assert tokens == harness.model.dense_greedy([1, 2, 3], 2)
    assert "replay failed (call 3, embedding" in caplog.text


def test_a_failed_replay_of_a_recurrent_model_fails_the_step(
    harness: Any, graph: FakeGraph
) -> None:
    """Its states may have moved on."""
    graph.failing = True
    harness.worker._runner.requests.state_groups = frozenset({0})
    with pytest.raises(ReplayFailed, match="call 3, embedding"):
        harness.step({"a": 3}, [harness.new("a", [1, 2, 3])])


def test_closing_the_worker_closes_the_graph(harness: Any, graph: FakeGraph) -> None:
    harness.worker.close()
    assert graph.closed


def step(batch: ForwardBatch) -> Tensor:
    raise AssertionError("only the graph runs it")


SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "num_groups": 1, "device": "cpu"}


@pytest.mark.parametrize(
    ("capture", "line"),
    [
        (Capture(lambda: FakeGraph, (4, 8)), "captured steps of up to 4, 8 tokens: 7 kernel calls"),
        (
            Capture(lambda: lambda: FakeGraph("torch operation aten.mul"), (4,)),
            "steps run eagerly: torch operation aten.mul",
        ),
        (Capture(lambda: None, (4,)), "steps run eagerly: the kernels in use cannot be recorded"),
        (
            Capture(lambda: FakeGraph, (4,), enforce_eager=True),
            "steps run eagerly: enforce_eager",
        ),
    ],
    ids=["captured", "refused", "no-graph", "enforced"],
)
def test_the_log_says_in_one_line_what_became_of_it(
    capture: Capture, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace_engine.execution.capture")
    graph = capture_steps(capture, step, **SETTINGS)
    assert (graph is not None) == line.startswith("captured")
    (message,) = caplog.messages
    assert message.startswith(line)
    if graph is not None:
        assert message.endswith("s, 3.0 MiB")


@pytest.mark.parametrize(
    ("wanted", "maximum", "limit", "sizes"),
    [
        ((), None, 2048, (16, 64, 256, 512, 2048)),
        ((), None, 100, (16, 64, 100)),
        ((), 32, 2048, (16, 32)),
        ((8, 1, 8), None, 2048, (1, 8)),
        ((4000,), None, 2048, (2048,)),
    ],
)
def test_capture_sizes(
    wanted: tuple[int, ...], maximum: int | None, limit: int, sizes: tuple[int, ...]
) -> None:
    assert capture_sizes(wanted, maximum, max_num_batched_tokens=limit) == sizes


def test_the_profile_counts_what_captured_steps_hold() -> None:
    limits = WorkerLimits(
        vocab_size=37, max_model_len=96, max_num_batched_tokens=64, max_num_seqs=16
    )
    captured, eager = (Capture(lambda: FakeGraph, (16,), is_eager) for is_eager in (False, True))
    largest = {"activations": 1000, "logits": 100}
    assert captured_bytes(captured, limits, recordings=1, **largest) == 1000 * 16 // 64 + 2 * 100
    assert captured_bytes(captured, limits, recordings=2, **largest) == 2 * (250 + 200)
    assert captured_bytes(eager, limits, recordings=1, **largest) == 0
    assert captured_bytes(None, limits, recordings=1, **largest) == 0


EACH_KIND = [1, 16, 4]
"""Tokens of made-up steps: of one request, of many, and of a prompt as long as a block."""


@pytest.mark.parametrize(
    ("capture", "tokens"),
    [
        (Capture(lambda: FakeGraph, (8,)), [3]),
        (Capture(lambda: lambda: FakeGraph("no"), (8,)), [3, *EACH_KIND]),
        (Capture(lambda: FakeGraph, (8,), enforce_eager=True), EACH_KIND),
        (None, EACH_KIND),
    ],
    ids=["captured", "refused", "enforced", "none"],
)
def test_a_start_runs_as_few_steps_as_it_must(
    tiny: Any, capture: Capture | None, tokens: list[int]
) -> None:
    """One for what is recorded, with rows of all kinds; else one of each kind, as requests will run them."""
    made = tiny.Harness(tiny.LM(), capture=capture)
    made.model.forwards.clear()
    made.worker.warm_up()
    assert EACH_KIND[-1] == tiny.BLOCK_SIZE
    assert made.model.forwards == tokens
