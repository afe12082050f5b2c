from __future__ import annotations

import pytest

from headrace_core.errors import RequestError
from headrace_core.pooling.scoring import pair_up


@pytest.mark.parametrize(
    ("first", "second", "pairs"),
    [("a", "x", "ax"), ("a", "xyz", "ax ay az"), ("abc", "xyz", "ax by cz")],
)
def test_one_and_many(first: str, second: str, pairs: str) -> None:
    assert ["".join(pair) for pair in pair_up(list(first), list(second))] == pairs.split()


@pytest.mark.parametrize(("first", "second"), [("ab", "x"), ("ab", "xyz"), ("abc", "xy")])
def test_other_numbers_fit_no_form(first: str, second: str) -> None:
    wanted = f"{len(first)} and {len(second)} texts .*1:1, 1:N or N:N"
    with pytest.raises(RequestError, match=wanted):
        pair_up(list(first), list(second))


@pytest.mark.parametrize(("first", "second"), [("", "x"), ("a", ""), ("", "")])
def test_neither_side_is_empty(first: str, second: str) -> None:
    with pytest.raises(RequestError, match="neither side may be empty"):
        pair_up(list(first), list(second))
