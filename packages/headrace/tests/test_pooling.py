"""What the offline pooling calls make of their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import PoolingParams
from headrace.offline.arguments import as_prompts
from headrace.offline.pooling import (
    as_tensor,
    chosen_task,
    completed,
    for_all,
    score_inputs,
    tokenizing,
)
from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError


def test_a_call_without_a_task_lists_the_methods() -> None:
    with pytest.raises(RequestError, match=r"token_embed.*LLM\.embed \(embed\).*LLM\.reward"):
        chosen_task(None, None)
    with pytest.raises(RequestError, match="pooling_task = 'dance': must be one of embed"):
        chosen_task(None, "dance")
    assert chosen_task(PoolingParams(task="classify"), None) == "classify"
    assert chosen_task(PoolingParams(task="classify"), "embed") == "embed"  # verified later


def test_several_parameters_may_agree_on_a_task() -> None:
    embed, classify = PoolingParams(task="embed"), PoolingParams(task="classify")
    assert chosen_task([embed, embed], None) == "embed"
    for params in ([embed, classify], [embed, PoolingParams()], []):
        with pytest.raises(RequestError, match="pooling_task = None"):
            chosen_task(params, None)


def test_calls_without_prompts_of_their_own_take_one_set_of_parameters() -> None:
    given = PoolingParams()
    assert for_all(given) is given
    assert for_all(None) is None
    with pytest.raises(RequestError, match="pooling_params: 2 given; must be one"):
        for_all([given, given])


def test_truncation_and_prompts_are_arguments_of_their_own() -> None:
    given = PoolingParams(normalize=False)
    assert completed(given) is given
    assert completed(given, truncate_prompt_tokens=3) == PoolingParams(3, normalize=False)
    assert completed(None, truncate_prompt_tokens=-1) == PoolingParams(-1)
    assert completed([given, PoolingParams()], truncate_prompt_tokens=2, prompt_name="q") == [
        PoolingParams(2, normalize=False, prompt_name="q"), PoolingParams(2, prompt_name="q"),
    ]  # fmt: skip
    assert (given.truncate_prompt_tokens, given.prompt_name) == (None, None)
    with pytest.raises(RequestError, match="truncate_prompt_tokens = 0"):
        completed(given, truncate_prompt_tokens=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"normalize": False}, r"pooling_params = \{'normalize': False\}: must be a PoolingParams"),
        ("embed", "pooling_params = 'embed': must be"),
        (False, "pooling_params = False: must be"),
        ([PoolingParams(), None], r"pooling_params\[1\] = None: must be a PoolingParams"),
        ([{}], r"pooling_params\[0\] = \{\}: must be"),
    ],
)
def test_what_are_no_parameters(given: Any, said: str) -> None:
    for more in ({}, {"truncate_prompt_tokens": 3}):
        with pytest.raises(RequestError, match=said):
            completed(given, **more)


def test_how_texts_are_tokenized() -> None:
    assert tokenizing(None, 3) == (3, None)
    assert tokenizing({"truncate_prompt_tokens": 2, "add_special_tokens": False}, 3) == (2, False)
    for given, said in (
        (["a"], r"tokenization_kwargs = \['a'\]: must be a mapping"),
        ({"add_special_tokens": "no"}, "add_special_tokens = 'no': must be True, False or None"),
        ({"max_length": 5, 3: 4}, r"\['3', 'max_length'\] cannot be served; must be of add_"),
    ):
        with pytest.raises(RequestError, match=said):
            tokenizing(given, None)  # type: ignore[arg-type]


def test_one_side_of_pairs() -> None:
    assert score_inputs("a") == ["a"]
    assert score_inputs({"prompt": "a"}) == [{"prompt": "a"}]
    assert score_inputs(("a", "b")) == ["a", "b"]
    with pytest.raises(RequestError, match="data = None: must be text, token ids, a dictionary"):
        score_inputs(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, b"text", bytearray(b"text"), Path("texts")])
def test_what_are_no_prompts(given: Any) -> None:
    with pytest.raises(RequestError, match=r"prompts = .*: must be text, token ids, a dictionary"):
        as_prompts(given)


def test_tensors_are_copies() -> None:
    data = PackedArray("float32", (2, 1), bytes(8))
    tensor = as_tensor(data)
    tensor += 1
    assert tensor.tolist() == [[1.0], [1.0]]
    assert data.tolist() == [[0.0], [0.0]]
    assert as_tensor(PackedArray("float32", (0, 4), b"")).shape == (0, 4)
