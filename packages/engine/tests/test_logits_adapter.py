"""Rules for single requests, in a processor of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.sampling.logits_processor import BatchUpdate, MoveDirectionality
from headrace_core.sampling.params import SamplingParams
from headrace_engine.logits_adapter import AdapterLogitsProcessor, ForbiddenWords

ONE_WAY = MoveDirectionality.UNIDIRECTIONAL


class Adapted(AdapterLogitsProcessor):
    """Rows here are any objects: the adapter only hands them over."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        kind = (params.extra_args or {}).get("kind")
        return {
            None: None,
            "two": lambda output, row: (row, list(output)),
            "three": lambda prompt, output, row: (row, list(prompt), list(output)),
            "one": lambda row: row,
        }[kind]


def test_an_adapter_hands_rows_to_the_requests_own_rules() -> None:
    adapter = Adapted(None, None, False)  # type: ignore[arg-type]
    output: list[int] = [7]
    added = [
        (slot, SamplingParams(extra_args=None if kind is None else {"kind": kind}), prompt, output)
        for slot, (kind, prompt) in enumerate(
            [("two", [1]), (None, [2]), ("three", [3]), ("three", None)]
        )
    ]
    adapter.update_state(BatchUpdate(4, added=added))
    output.append(8)  # the list is live
    assert adapter.apply(["a", "b", "c", "d"]) == [
        ("a", [7, 8]), "b", ("c", [3], [7, 8]), ("d", [], [7, 8]),
    ]  # fmt: skip
    adapter.update_state(BatchUpdate(2, removed=[0, 2], moved=[(3, 0, ONE_WAY)]))
    assert adapter.apply(["a", "b"]) == [("a", [], [7, 8]), "b"]
    adapter.update_state(None)
    adapter.update_state(BatchUpdate(1, removed=[0], moved=[(1, 0, ONE_WAY)]))
    assert adapter.apply(["a"]) == ["a"]
    bad = SamplingParams(extra_args={"kind": "one"})
    with pytest.raises(TypeError, match=r"Adapted.*1 arguments"):
        adapter.update_state(BatchUpdate(2, added=[(1, bad, [1], [])]))


class Row(list):  # type: ignore[type-arg]
    """As much of a tensor as a rule for a row needs."""

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)


def test_forbidden_words() -> None:
    rule = ForbiddenWords([[1], [2, 3], [2, 2, 4], []])

    def impossible(*output: int) -> set[int]:
        row = rule(list(output), Row([0.0] * 6))  # type: ignore[arg-type]
        return {i for i, value in enumerate(row) if value == float("-inf")}

    assert impossible() == {1}
    assert impossible(2) == {1, 3}
    assert impossible(2, 2) == {1, 3, 4}
    assert impossible(2, 5) == {1}
    with pytest.raises(ValueError, match=r"\[-1, 9\]: must be in 0..5"):
        ForbiddenWords([[9, 1], [-1]])([], Row([0.0] * 6))  # type: ignore[arg-type]
