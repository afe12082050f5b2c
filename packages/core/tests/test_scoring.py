from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.scoring import check_activation, pair_up
from headrace_testing.fakes.pooling import fake_pooling_info


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


@pytest.mark.parametrize(
    ("scoring", "said"), [("cosine", "the cosine"), ("late_interaction", "best")]
)
@pytest.mark.parametrize("name", ["use_activation", "softmax", "activation"])
def test_an_embedding_model_s_scores_have_no_activation(scoring: str, said: str, name: str) -> None:
    value: Any = {name: False}
    asked = PoolingParams(**value)
    with pytest.raises(
        RequestError, match=rf"{name} = False: .* embedding model .*/score.*{said}"
    ) as caught:
        check_activation(asked, fake_pooling_info(scoring=scoring))
    assert caught.value.param == name
    check_activation(PoolingParams(normalize=True), fake_pooling_info(scoring=scoring))
    check_activation(asked, fake_pooling_info(scoring="cross"))
