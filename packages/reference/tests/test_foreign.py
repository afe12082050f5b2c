"""Core's parameters take numbers and arrays of numpy and torch; core's own tests run without torch."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from headrace_core.arrays import own_mapping, own_value, own_values
from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingParams
from headrace_core.sampling.params import BeamSearchParams, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize("whole", [np.int64, np.uint8, np.int32, torch.tensor])
@pytest.mark.parametrize(
    "name",
    ["max_tokens", "min_tokens", "n", "seed", "top_k", "logprobs", "prompt_logprobs",
     "truncate_prompt_tokens", "thinking_token_budget"],
)  # fmt: skip
def test_integers_of_other_libraries(name: str, whole: Any) -> None:
    value = getattr(SamplingParams(**{name: whole(3)}), name)
    assert (type(value), value) == (int, 3)


@pytest.mark.parametrize("real", [np.float32, np.float64, np.float16, torch.tensor])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
def test_floats_of_other_libraries(name: str, real: Any) -> None:
    value = getattr(SamplingParams(**{name: real(0.5)}), name)
    assert (type(value), value) == (float, 0.5)


@pytest.mark.parametrize("name", ["ignore_eos", "detokenize", "skip_special_tokens"])
@pytest.mark.parametrize("yes", [np.bool_(True), torch.tensor(True)])
def test_flags_of_other_libraries(name: str, yes: Any) -> None:
    assert getattr(SamplingParams(**{name: yes}), name) is True


@pytest.mark.parametrize(
    "ids",
    [np.array([3, 5]), torch.tensor([3, 5]), [np.int64(3), torch.tensor(5)], (3, 5), range(3, 6, 2),
     iter([3, 5])],
)  # fmt: skip
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logprob_token_ids"])
def test_lists_of_ids(name: str, ids: Any) -> None:
    ids = iter([3, 5]) if not hasattr(ids, "__len__") else ids
    found = getattr(SamplingParams(**{name: ids}), name)
    assert found == [3, 5]
    assert [type(one) for one in found] == [int, int]


def test_texts_and_biases() -> None:
    params = SamplingParams(
        stop=np.array(["a", "b"]),  # type: ignore[arg-type]
        bad_words=("c",),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(0.5), torch.tensor(4): torch.tensor(2)},  # type: ignore[dict-item]
    )
    assert (params.stop, params.bad_words) == (["a", "b"], ["c"])
    assert params.logit_bias == {3: 0.5, 4: 2}
    assert {type(k) for k in params.logit_bias} == {int}


def test_what_is_set_later_is_converted_where_it_is_checked() -> None:
    params = SamplingParams()
    params.seed, params.temperature = np.int64(7), np.float32(0)  # type: ignore[assignment]
    params.validate()
    assert (type(params.seed), type(params.temperature)) == (int, float)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", math.nan), ("temperature", np.float32("nan")), ("top_p", torch.tensor(math.nan)),
     ("max_tokens", np.float32(3)), ("max_tokens", np.array([3])), ("max_tokens", np.bool_(True)),
     ("n", torch.tensor([1, 2])), ("stop_token_ids", np.array(3)),
     ("stop_token_ids", np.array([[1], [2]])), ("allowed_token_ids", np.array([0.5])),
     ("seed", torch.tensor(3, device="meta")), ("logit_bias", {3: math.nan}),
     ("logit_bias", {3: math.inf}), ("logit_bias", {3: 1e39}), ("logit_bias", {3: -1e39}),
     ("logit_bias", {np.float32(3): 1.0})],
)  # fmt: skip
def test_what_no_number_can_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}.*must be") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_bias_of_minus_infinity_is_a_ban() -> None:
    assert SamplingParams(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}


def test_pooling_parameters() -> None:
    params = PoolingParams(
        truncate_prompt_tokens=np.int64(4), dimensions=torch.tensor(8), normalize=np.bool_(False),
        returned_token_ids=np.array([1, 2]), num_left_out=np.int32(1), step_tag_id=np.int64(2),
    )  # type: ignore[arg-type]  # fmt: skip
    assert params == PoolingParams(4, 8, False, None, None, None, 2, [1, 2], num_left_out=1)
    assert [type(v) for v in (params.truncate_prompt_tokens, params.dimensions)] == [int, int]
    params.dimensions = np.int64(16)  # type: ignore[assignment]
    params.verify("embed", None)
    assert type(params.dimensions) is int
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        PoolingParams(truncate_prompt_tokens=np.array([4]))  # type: ignore[arg-type]


def test_beam_parameters() -> None:
    params = BeamSearchParams(np.int64(2), torch.tensor(5), length_penalty=np.float32(0.5))  # type: ignore[arg-type]
    assert (params.beam_width, params.max_tokens, params.length_penalty) == (2, 5, 0.5)
    assert type(params.beam_width) is int
    with pytest.raises(RequestError, match="ignore_eos"):
        BeamSearchParams(2, 5, ignore_eos="yes")  # type: ignore[arg-type]


def test_constraints() -> None:
    assert StructuredOutputsParams(choice=np.array(["a", "b"])).choice == ["a", "b"]  # type: ignore[arg-type]
    assert StructuredOutputsParams(choice=("a", "b")).choice == ["a", "b"]  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"structured_outputs\.choice"):
        StructuredOutputsParams(choice="ab")  # type: ignore[arg-type]


def test_every_field_of_a_constraint() -> None:
    schema = {
        "properties": {np.str_("a"): {"enum": np.array([1, 2]), "minimum": np.float32(2)}},
        "required": ("a",),
        "maxProperties": torch.tensor(3),
    }
    plain = {
        "properties": {"a": {"enum": [1, 2], "minimum": 2.0}},
        "required": ["a"],
        "maxProperties": 3,
    }
    params = StructuredOutputsParams(json=schema, disable_fallback=np.bool_(True))  # type: ignore[arg-type]
    assert params.json == plain
    assert json.dumps(params.json)
    assert params.disable_fallback is True
    assert StructuredOutputsParams(structural_tag={"format": schema}).structural_tag == {
        "format": plain
    }
    assert StructuredOutputsParams(json_object=np.bool_(True)).json_object is True  # type: ignore[arg-type]
    for name in ("regex", "grammar", "json"):
        made = StructuredOutputsParams(**{name: np.str_("a"), "whitespace_pattern": np.str_(" ")})
        assert type(getattr(made, name)) is type(made.whitespace_pattern) is str
    assert StructuredOutputsParams(choice=[np.str_("a")]).choice == ["a"]
    for wrong in ({"json_object": "yes"}, {"regex": "a", "disable_fallback": "no"}):
        with pytest.raises(RequestError, match="must be True"):
            StructuredOutputsParams(**wrong)  # type: ignore[arg-type]
    deep: dict[str, object] = {}
    deep["items"] = deep
    assert StructuredOutputsParams(json=deep).json is deep  # refused later, by its depth


def test_values() -> None:
    assert own_value(Fraction(1, 2)) == 0.5
    assert own_value(np.array([[1, 2]])) == [[1, 2]]
    assert own_value("text") == "text"
    assert own_values({"a": 1}) == {"a": 1}
    assert own_mapping([1]) == [1]
    same = [1, 2]
    assert own_values(same) is same
    meta = torch.zeros(2, device="meta")
    assert own_value(meta) is meta
