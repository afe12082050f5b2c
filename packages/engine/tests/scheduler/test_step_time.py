"""The expected time of a step, learned from steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_engine.scheduler.step_time import STRETCH, StepTimeModel

seconds = st.floats(1e-6, 1e3)
steps = st.lists(st.tuples(seconds, st.integers(0, 300), st.integers(0, 4000)), max_size=60)


def learned(observed: list[tuple[float, int, int]]) -> StepTimeModel:
    model = StepTimeModel()
    for one in observed:
        model.record(*one)
    return model


def truth(num_decoding: int, num_prompt: int) -> float:
    return 0.03 + 0.002 * num_decoding + 0.001 * num_prompt


@given(
    observed=steps,
    decoding=st.integers(0, 300),
    more=st.integers(0, 300),
    prompt=st.integers(0, 5000),
)
def test_more_tokens_never_take_less_time(
    observed: list[tuple[float, int, int]], decoding: int, more: int, prompt: int
) -> None:
    model = learned(observed)
    expected = model.expected(decoding, prompt)
    assert 0 <= expected <= model.expected(decoding + more, prompt) < float("inf")
    assert expected <= model.expected(decoding, prompt + more)


@given(
    observed=steps,
    decoding=st.integers(0, 300),
    more=st.integers(0, 300),
    target=seconds,
    longer=seconds,
)
def test_room_grows_with_time_and_shrinks_with_those_that_decode(
    observed: list[tuple[float, int, int]], decoding: int, more: int, target: float, longer: float
) -> None:
    model = learned(observed)
    room = model.prompt_tokens_within(target, decoding)
    assert 0 <= room <= model.prompt_tokens_within(target + longer, decoding)
    assert model.prompt_tokens_within(target, decoding + more) <= room
    if room:
        assert model.expected(decoding, room) <= target * (1 + 1e-9)


@given(observed=steps)
def test_the_same_steps_teach_the_same(observed: list[tuple[float, int, int]]) -> None:
    first, second = learned(observed), learned(observed)
    assert first.expected(7, 70) == second.expected(7, 70)


@given(observed=steps, target=seconds)
def test_prompts_get_no_more_than_twice_what_they_had(
    observed: list[tuple[float, int, int]], target: float
) -> None:
    largest = max((prompt for _, _, prompt in observed), default=0)
    assert learned(observed).prompt_tokens_within(target, 0) <= STRETCH * largest


def test_nothing_is_known_before_the_first_step() -> None:
    model = StepTimeModel()
    assert (model.expected(8, 100), model.prompt_tokens_within(1e9, 0)) == (0.0, 0)
    model.record(0.04, 8, 0)
    assert model.expected(8, 0) == 0.04
    assert model.prompt_tokens_within(1e9, 8) == 0, "no prompt was seen"
    model.record(0.05, 0, 0)
    assert model.expected(8, 0) == 0.04, "a step without requests says nothing"


def test_a_straight_line_is_found() -> None:
    model = StepTimeModel()
    for turn in range(60):
        decoding, prompt = 4 + turn % 9, 20 + turn * 37 % 180
        model.record(truth(decoding, 0), decoding, 0)
        model.record(truth(decoding, prompt), decoding, prompt)
    for decoding, prompt in ((4, 0), (12, 0), (8, 100), (12, 250)):
        assert model.expected(decoding, prompt) == pytest.approx(truth(decoding, prompt), rel=0.05)
    assert model.prompt_tokens_within(0.12, 8) == pytest.approx(74, abs=5)


def test_steps_that_are_all_alike_do_not_lose_the_slope() -> None:
    model = learned([(truth(8, 0), 8, 0)] * 20 + [(truth(8, 40), 8, 40)] * 2000)
    assert model.per_prompt_token == pytest.approx(0.001)
    assert model.expected(8, 0) == pytest.approx(truth(8, 0))


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_an_outlier_says_little(factor: float) -> None:
    model = learned([(truth(8, 0), 8, 0), (truth(8, 40), 8, 40)] * 30)
    for decoding, prompt in ((8, 0), (8, 40)):
        model.record(factor * truth(decoding, prompt), decoding, prompt)
        assert model.expected(8, 40) == pytest.approx(truth(8, 40), rel=0.2)
    for _ in range(15):
        model.record(truth(8, 0), 8, 0)
        model.record(truth(8, 40), 8, 40)
    assert model.expected(8, 40) == pytest.approx(truth(8, 40), rel=0.05)


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_a_machine_that_has_changed_is_learned_anew(factor: float) -> None:
    model = learned([(truth(8, 0), 8, 0), (truth(8, 40), 8, 40)] * 30)
    for _ in range(80):
        model.record(factor * truth(8, 0), 8, 0)
        model.record(factor * truth(8, 40), 8, 40)
    assert model.expected(8, 40) == pytest.approx(factor * truth(8, 40), rel=0.05)


@pytest.mark.parametrize("plain", [0.5, 0.8, 1.25, 1.6])
def test_where_prompts_are_in_every_step_an_old_plain_step_does_no_harm(plain: float) -> None:
    """Steps without prompts took ``plain`` times what they would now; the target is kept all the same."""
    model = learned([(plain * truth(8, 0), 8, 0)] * 20)
    model.record(truth(0, 200), 0, 200)
    target, taken = 0.12, []
    for _ in range(120):
        prompt = max(16, model.prompt_tokens_within(target, 8))
        taken.append(truth(8, prompt))
        model.record(taken[-1], 8, prompt)
    assert taken[-1] == pytest.approx(target, rel=0.1)
