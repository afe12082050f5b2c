"""Guesses by hidden states: which rows belong to whom, and what waits for its token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import UnsupportedFeature
from headrace_core.speculation import DraftTask, ReadsStates, StepStates
from headrace_engine.execution.inputs import InputBuilder
from headrace_engine.execution.requests import RequestTable
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.speculation.draft_context import DraftContext
from headrace_engine.speculation.head import MOST_WAITING, HeadProposer
from headrace_engine.speculation.states import StateTap
from headrace_reference import sample, top_logprobs
from headrace_testing.engine.draft_proposers import DraftProposerConformance
from headrace_testing.fakes.requests import new_request

VOCAB = 100
BLOCK = 16


class Summing:
    """A head whose state is a number: it adds the token behind it, and guesses that sum.

    Args:
        caches: whether it says that it has layers with caches.
    """

    streams: Sequence[int] = ()
    width = 1
    token_ids = None

    def __init__(self, *, caches: bool = True, most: int | None = None) -> None:
        self.most = most
        self.caches = caches
        self.passes: list[tuple[list[int], list[int], list[float]]] = []
        """Positions, tokens behind them, states."""

    def attention_layers(self) -> Mapping[str, Any]:
        return {"a": None} if self.caches else {}

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return hidden.clone()

    def forward(self, batch: ForwardBatch, states: Tensor, depth: int) -> Tensor:
        ids = batch.input_ids
        self.passes.append((batch.positions.tolist(), ids.tolist(), states[:, 0].tolist()))
        out = states + ids[:, None]
        return out if batch.logits_rows is None else out[batch.logits_rows]

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        logits = torch.zeros(len(states), VOCAB)
        logits[torch.arange(len(states)), states[:, 0].long() % VOCAB] = 1.0
        return logits


class Steps:
    """A worker's table, and steps whose hidden state at position p of request r is ``1000 r + p``."""

    def __init__(self, head: Summing, max_len: int = 500) -> None:
        self.head = head
        self.table = RequestTable([0], vocab_size=VOCAB, seed=0)
        context = DraftContext(
            self.table, lambda batch: batch, Sampler(sample, top_logprobs), BLOCK,
            torch.device("cpu"), max_len,
        )  # fmt: skip
        self.proposer = HeadProposer(head, context)
        self.table.follow(self.proposer)
        self.inputs = InputBuilder(self.table, block_size=BLOCK, device=torch.device("cpu"))
        self.tap = StateTap(self.proposer, Numbers(), self.table)  # type: ignore[arg-type]

    def add(self, name: str, ids: Sequence[int], computed: int = 0) -> None:
        blocks = list(range(1, 40))
        self.table.add(new_request(name, ids, (blocks,), num_computed_tokens=computed))

    def run(self, counts: Mapping[str, int], chosen: Mapping[str, Sequence[int]]) -> None:
        """A step: so many tokens of each, guesses included; then these tokens are chosen."""
        inputs = self.inputs.build(counts)
        assert inputs.batch is not None
        self.tap.take(self.tap.forward(inputs.batch), inputs.batch.logits_rows)
        for row, end in zip(inputs.rows.tolist(), inputs.seq_lens.tolist()):
            self.table.num_computed_tokens[row] = end
        for name, tokens in chosen.items():
            row = self.table.row_of[name]
            for token in tokens:
                self.table.append_tokens(np.array([row]), np.array([token]))
            self.table.num_computed_tokens[row] = self.table.num_tokens[row] - 1
        self.table.place_drafts({})
        self.tap.tell(inputs)

    def task(self, name: str, most: int = 3) -> DraftTask:
        row = self.table.row_of[name]
        return DraftTask(name, self.table.token_ids[row, : self.table.num_tokens[row]],
                         int(self.table.num_prompt_tokens[row]), most)  # fmt: skip

    def propose(self, *names: str, most: int = 3) -> list[list[int]]:
        return [list(g) for g in self.proposer.propose([self.task(name, most) for name in names])]


class Numbers:
    def forward(self, batch: ForwardBatch) -> Tensor:
        assert batch.logits_rows is None
        return batch.positions[:, None].float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class TestRows:
    def test_a_state_goes_with_the_token_behind_it(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {"a": [8]})
        # State 2 and token 8 make 10, then 10 + 10, then 20 + 20.
        assert steps.propose("a") == [[10, 20, 40]]
        assert steps.head.passes == [
            ([0, 1, 2], [6, 7, 8], [0.0, 1.0, 2.0]), ([3], [10], [10.0]), ([4], [20], [20.0]),
        ]  # fmt: skip

    def test_wrong_guesses_are_left_out(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {"a": [8]})
        steps.propose("a")
        steps.table.place_drafts({"a": [9, 4, 4]})
        steps.run({"a": 4}, {"a": [9, 30]})  # the first was right
        steps.head.passes.clear()
        assert steps.propose("a", most=1) == [[34]]
        assert steps.head.passes == [([3, 4], [9, 30], [3.0, 4.0])]

    def test_a_request_that_is_left_alone_does_not_lag_behind(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5])
        steps.run({"a": 1}, {"a": [1]})
        for token in range(2, 30):
            steps.run({"a": 1}, {"a": [token]})
            waiting = sum(map(len, steps.proposer._waiting[steps.table.row_of["a"]]))
            assert 1 <= waiting <= MOST_WAITING
        assert steps.propose("a", most=1) == [[28 + 29]]
        positions = [p for places, _, _ in steps.head.passes for p in places]
        assert positions == list(range(29))

    def test_prompts_are_computed_chunk_by_chunk(self) -> None:
        steps = Steps(Summing())
        ids = list(range(1, 61))
        steps.add("a", ids)
        steps.add("b", [7, 8])
        steps.run({"a": 25}, {})
        steps.run({"a": 25, "b": 2}, {"b": [3]})
        steps.run({"a": 10, "b": 1}, {"a": [1], "b": [4]})
        assert steps.propose("b", "a", most=1) == [[2 + 4], [59 + 1]]
        known = {(p, t) for places, tokens, _ in steps.head.passes for p, t in zip(places, tokens)}
        assert {(p, ids[p + 1]) for p in range(59)} <= known

    def test_what_was_found_in_the_cache_is_there(self) -> None:
        steps = Steps(Summing())
        steps.add("a", list(range(40)), computed=32)
        steps.run({"a": 8}, {"a": [9]})
        assert steps.propose("a", most=1) == [[39 + 9]]
        assert min(steps.head.passes[0][0]) == 32

    def test_rows_are_used_again(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {"a": [8]})
        steps.table.remove("a")
        steps.add("b", [1, 2])
        assert steps.propose("b") == [[]]
        steps.run({"b": 2}, {"b": [3]})
        assert steps.propose("b", most=1) == [[1 + 3]]

    def test_a_token_that_is_late_is_waited_for(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {})
        assert steps.propose("a") == [[]]
        steps.table.append_tokens(np.array([steps.table.row_of["a"]]), np.array([8]))
        assert steps.propose("a", most=1) == [[10]]

    def test_the_same_states_give_one_guess(self) -> None:
        steps = Steps(Summing())
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {"a": [8]})
        assert steps.propose("a", most=1) == [[10]]
        assert steps.propose("a", most=1) == [[]]

    def test_no_guess_is_behind_the_longest_context(self) -> None:
        steps = Steps(Summing(), max_len=6)
        steps.add("a", [5, 6, 7])
        steps.run({"a": 3}, {"a": [8]})
        assert steps.propose("a") == [[10, 20]]

    def test_heads_without_caches_read_the_last_state(self) -> None:
        steps = Steps(Summing(caches=False, most=2))
        steps.add("a", list(range(1, 31)))
        steps.run({"a": 30}, {"a": [8]})
        assert steps.propose("a", most=5) == [[37, 74]]
        assert steps.head.passes[0] == ([29], [8], [29.0])
        assert steps.propose("a", most=1) == [[37]]


class Told(HeadProposer):
    """Is told of each task's states before it is asked."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        steps = self.steps
        for task in tasks:
            ids = task.token_ids.tolist()
            steps.add(task.request_id, ids)
            row = steps.table.row_of[task.request_id]
            steps.table.num_tokens[row] = len(ids)
            if len(ids) > 1:
                hidden = torch.arange(len(ids) - 1.0)[:, None]
                one, start = np.array([len(ids) - 1]), np.array([0])
                self.observe(StepStates([task.request_id], start, one, start, hidden, []))
        return super().propose(tasks)


class TestConforms(DraftProposerConformance):
    def make(self) -> HeadProposer:
        steps = Steps(Summing())
        steps.proposer.__class__ = Told
        steps.proposer.steps = steps  # type: ignore[attr-defined]
        return steps.proposer


class Reader(ReadsStates):
    streams = (1,)

    def __init__(self, settings: Mapping[str, Any]) -> None: ...
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        return [[] for _ in tasks]

    def observe(self, states: StepStates) -> None: ...


def test_a_model_that_shows_no_streams_is_refused() -> None:
    table = RequestTable([0], vocab_size=VOCAB, seed=0)
    with pytest.raises(UnsupportedFeature, match=r"streams \[1\]: Numbers shows none"):
        StateTap(Reader({}), Numbers(), table)  # type: ignore[arg-type]
