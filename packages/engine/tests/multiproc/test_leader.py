"""Passes that rank 0 leads where the vocabulary is divided: who is told what."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_engine.multiproc.leader import LOGITS, LOGITS_OF_ROWS, PassLeader
from headrace_engine.multiproc.messages import ModelPass

TABLE = torch.arange(15.0).view(5, 3)
BATCH = ForwardBatch(
    input_ids=torch.tensor([1, 2, 3, 4]),
    positions=torch.arange(4),
    cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
    seq_lens=torch.tensor([4], dtype=torch.int32),
    max_seqlen_q=4,
    max_seqlen_k=4,
    groups=(),
)


class Whole:
    """A model with a head on each rank."""

    def token_vectors(self, ids: Tensor) -> Tensor:
        return TABLE[ids]

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.token_vectors(batch.input_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ TABLE.T


class Divided(Whole):
    vocabulary_passes: Sequence[str] = ("token_vectors", "compute_logits")


class Staged(Divided):
    """One whose hidden states come to rank 0 alone."""

    def __init__(self) -> None:
        self.coming: Future[Any] = Future()

    def launch(self, batch: ForwardBatch) -> Future[Any]:
        raise AssertionError("not asked for")

    def expect(self, num_rows: int) -> Future[Any]:
        return self.coming


@pytest.fixture
def sent() -> list[ModelPass]:
    return []


def led(model: Any, sent: list[ModelPass]) -> Any:
    leader = PassLeader(sent.append, lambda error: error, lambda method, args: [])
    leader.lead(model)
    return model


def test_a_whole_head_is_rank_0s_own(sent: list[ModelPass]) -> None:
    model = led(Whole(), sent)
    logits = model.compute_logits(model.forward(BATCH))
    assert [message.method for message in sent] == ["forward"]
    assert torch.equal(logits, TABLE[1:] @ TABLE.T)


def test_rows_that_all_ranks_have_are_named(sent: list[ModelPass]) -> None:
    model = led(Divided(), sent)
    hidden = model.forward(BATCH)
    assert [message.method for message in sent] == ["forward"], "its own lookup is part of it"
    assert torch.equal(model.compute_logits(hidden[1:3]), TABLE[2:4] @ TABLE.T)
    model.compute_logits(hidden)
    assert sent[1:] == [ModelPass(LOGITS_OF_ROWS, (1, 2)), ModelPass(LOGITS_OF_ROWS, (0, 4))]


@pytest.mark.parametrize(
    "other",
    [
        lambda hidden: hidden.clone(),
        lambda hidden: hidden[[0, 2]],
        lambda hidden: hidden[::2],
        lambda hidden: hidden.T.contiguous().T[:2],
        lambda hidden: torch.zeros(2, 3),
    ],
    ids=["copy", "picked", "every second", "another layout", "foreign"],
)
def test_other_states_are_sent(other: Any, sent: list[ModelPass]) -> None:
    model = led(Divided(), sent)
    states = other(model.forward(BATCH))
    logits = model.compute_logits(states)
    assert sent[1].method == LOGITS
    assert torch.equal(sent[1].args[0], states)
    assert torch.equal(logits, states @ TABLE.T)


def test_states_of_an_earlier_pass_are_sent(sent: list[ModelPass]) -> None:
    model = led(Divided(), sent)
    earlier = model.forward(BATCH)
    model.forward(BATCH)
    model.compute_logits(earlier)
    assert sent[2].method == LOGITS


def test_the_result_of_stages_is_sent(sent: list[ModelPass]) -> None:
    model = led(Staged(), sent)
    model.compute_logits(model.forward(BATCH))
    assert [message.method for message in sent] == ["forward", LOGITS]


def test_who_guesses_looks_up_on_every_rank(sent: list[ModelPass]) -> None:
    model = led(Divided(), sent)
    assert torch.equal(model.token_vectors(torch.tensor([2])), TABLE[2:3])
    assert sent[0].method == "token_vectors"


def test_no_pass_follows_one_whose_result_did_not_come(sent: list[ModelPass]) -> None:
    model = Staged()
    led(model, sent)
    coming = model.expect(3)
    model.coming.set_exception(ValueError("a stage has died"))
    for further in (coming.result, lambda: model.forward(BATCH)):
        with pytest.raises(ValueError, match="a stage has died"):
            further()
    assert sent == []
