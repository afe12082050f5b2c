"""The end of reasoning is forced when its budget is used up."""

from __future__ import annotations

import pytest

from headrace_core.request import ThinkingBudget
from headrace_engine.sampling.logits_constraints import ThinkingLimit


def forced(budget: int, end: list[int], output: list[int]) -> int | None:
    return ThinkingLimit(ThinkingBudget(budget, end), output).forced


@pytest.mark.parametrize(
    ("budget", "end", "output", "token"),
    [
        (0, [9], [], 9),
        (0, [9], [9], None),
        (2, [9], [1], None),
        (2, [9], [1, 1], 9),
        (2, [9], [9, 1, 1, 1], None),
        (2, [7, 8], [1, 1], 7),
        (2, [7, 8], [1, 1, 7], 8),
        (2, [7, 8], [1, 7], 8),  # it has begun by itself
        (2, [7, 8], [1, 1, 7, 8], None),
        (2, [7, 8], [1, 7, 8, 1, 1], None),
        (2, [7, 7, 8], [1, 7, 7], 8),
        (3, [7, 7, 8], [1, 7, 7, 7], 8),
        (3, [7, 8], [7, 1, 1], 7),
    ],
)
def test_which_token_is_forced(
    budget: int, end: list[int], output: list[int], token: int | None
) -> None:
    assert forced(budget, end, output) == token


@pytest.mark.parametrize(
    ("budget", "output", "token"),
    [
        (0, [], None),
        (0, [1, 1, 1], None),  # an answer without reasoning
        (0, [5, 6], 7),
        (1, [5, 6], None),
        (1, [5, 6, 1], 7),
        (1, [5, 6, 1, 7], 8),
        (1, [5, 6, 1, 7, 8, 5, 6, 1], None),
        (2, [1, 1, 5, 6, 1, 1], 7),
        (0, [7, 8, 5, 6], None),
    ],
)
def test_where_the_model_marks_the_start_too(
    budget: int, output: list[int], token: int | None
) -> None:
    assert ThinkingLimit(ThinkingBudget(budget, [7, 8], [5, 6]), output).forced == token


def test_following_an_output_equals_being_given_it() -> None:
    end = [7, 7, 8]
    limit = ThinkingLimit(ThinkingBudget(4, end))
    output: list[int] = []
    for token in [1, 7, 7, 1]:
        assert limit.forced == forced(4, end, output)
        limit.observe(token)
        output.append(token)
    while (token_id := limit.forced) is not None:
        limit.observe(token_id)
        output.append(token_id)
    assert output == [1, 7, 7, 1, 7, 7, 8]
