from __future__ import annotations

import msgspec
import pytest

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.sampling.params import RequestOutputKind, SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("n", 0), ("n", 1.5), ("n", True), ("n", 10**9),
        ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 3),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", float("inf")),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "1"),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.0), ("min_p", -0.1), ("min_p", 1.1),
        ("stop", [""]), ("stop", ""), ("stop_token_ids", [-1]), ("max_tokens", 0),
        ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2), ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("logit_bias", {-1: 1.0}),
        ("logprob_token_ids", [-1]), ("logprob_token_ids", list(range(17))),
        ("logit_bias", {1: float("nan")}), ("bad_words", [""]), ("seed", 2**63), ("seed", 0.5),
        ("stop", 5), ("stop", b"x"), ("stop_token_ids", 5), ("allowed_token_ids", "12"),
        ("logprob_token_ids", 3), ("bad_words", "word"), ("bad_words", 5), ("logit_bias", [1]),
        ("output_kind", "DELTA"), ("output_kind", None), ("structured_outputs", {"regex": "a"}),
        ("ignore_eos", "no"), ("detokenize", None), ("skip_special_tokens", 2),
    ],
)  # fmt: skip
def test_out_of_range_values_are_refused_by_field(field, bad):
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: bad})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}, {"min_p": 1},
        {"repetition_penalty": 0.01}, {"max_tokens": None}, {"max_tokens": None, "min_tokens": 99},
        {"logprobs": -1}, {"logprobs": 0}, {"prompt_logprobs": 0}, {"truncate_prompt_tokens": -1},
        {"stop": "x"}, {"stop": ["x", "y"]}, {"n": 3}, {"seed": -1}, {"seed": 0}, {"logit_bias": {1: -100}},
        {"stop_token_ids": (3, 4)}, {"bad_words": ()}, {"ignore_eos": 1},
    ],
)  # fmt: skip
def test_values_at_the_border_are_accepted(good):
    SamplingParams(**good)


def test_greedy_neutralises_the_filters():
    params = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.1)
    assert params.greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)


def test_small_temperatures_are_raised_with_a_warning(caplog):
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "raised" in caplog.text


def test_seed_minus_one_means_none():
    assert SamplingParams(seed=-1).seed is None


def test_pairs_that_contradict():
    with pytest.raises(RequestError, match="n = 2"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_a_change_after_construction_is_found_by_validate():
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(RequestError, match="top_p"):
        params.validate()


def test_what_is_not_served_is_refused_by_name():
    with pytest.raises(UnsupportedFeature, match="logits_processors"):
        SamplingParams(logits_processors=[lambda ids, row: row])


def test_structured_outputs_wants_exactly_one_constraint():
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams()
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(regex="a", choice=["b"])
    with pytest.raises(RequestError, match="at least one"):
        StructuredOutputsParams(choice=[])
    assert StructuredOutputsParams(json=True).kind == "json"
    assert StructuredOutputsParams(json=False).kind == "json"
    assert StructuredOutputsParams(json_object=False, json=False).kind == "json"
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(json=False, regex="a")
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputsParams(json_object=False)
    assert StructuredOutputsParams(json_object=True, regex=None).kind == "json_object"


def test_clone_is_deep_unless_told_otherwise():
    params = SamplingParams(stop=["x"])
    assert params.clone().stop is not params.stop
    params.skip_clone = True
    assert params.clone() is params


def test_stop_ids_hold_eos_unless_ignored():
    params = SamplingParams(stop_token_ids=[7])
    assert params.all_stop_token_ids([1, 2]) == {1, 2, 7}
    params.ignore_eos = True
    assert params.all_stop_token_ids([1, 2]) == {7}


def test_from_optional_takes_none_as_default_but_for_max_tokens():
    params = SamplingParams.from_optional(top_p=None, max_tokens=None, temperature=0.5)
    assert (params.top_p, params.max_tokens, params.temperature) == (1.0, None, 0.5)


def test_generation_config_adds_further_end_tokens():
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 3]})
    assert params.stop_token_ids == [2, 3, 9]


def test_survives_the_process_border():
    params = SamplingParams(
        stop="x", logit_bias={3: 1.5}, output_kind=RequestOutputKind.DELTA, seed=5, bad_words=["a"]
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
