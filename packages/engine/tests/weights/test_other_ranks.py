"""Errors of other ranks: the lowest that failed is named, and all are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from headrace_core.errors import CapacityError, EngineDead, RequestError
from headrace_engine.weights.other_ranks import FirstError, OtherRanks, named


def answering(*outcomes: Any) -> tuple[OtherRanks, list[tuple[str, Sequence[Any]]]]:
    """Ranks from 1 on that answer so."""
    asked: list[tuple[str, Sequence[Any]]] = []

    def call(method: str, args: Sequence[Any]) -> list[Future[Any]]:
        asked.append((method, args))
        answers = [Future[Any]() for _ in outcomes]
        for answer, outcome in zip(answers, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
        return answers

    return OtherRanks(call), asked


def test_results_by_rank() -> None:
    others, asked = answering(3, 4)
    assert others.change("seal_share", 5) == [3, 4]
    assert asked == [("change_weights", ("seal_share", 5))]
    assert OtherRanks().change("seal_share") == []


def test_the_lowest_rank_that_failed_is_named() -> None:
    others, _ = answering(1, RequestError("path: no", param="path"), CapacityError("no memory"))
    with pytest.raises(RequestError, match=r"^rank 2: path: no$") as caught:
        others.change("take_place")
    assert caught.value.param == "path"
    others.undo("return_place")  # whose errors nobody could do anything about


def test_a_rank_that_ended_says_so_itself() -> None:
    dead = EngineDead("rank 1 (process 7) ended: killed by signal 9")
    assert named(1, dead) is dead
    others, _ = answering(dead)
    with pytest.raises(EngineDead, match=r"^rank 1 \(process 7\)"):
        others.change("take_place")


def test_the_first_error_stops_the_rest_once() -> None:
    others, _ = answering(RequestError("torn"), RequestError("not wanted any more"))
    stopped: list[int] = []
    failed = FirstError(lambda: stopped.append(1))
    failed.check()
    assert len(others.build("/new", failed)) == 2
    failed.note(0, RequestError("not wanted any more"))
    assert stopped == [1]
    with pytest.raises(RequestError, match=r"^rank 1: torn$"):
        failed.check()
