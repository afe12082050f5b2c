"""POST /inference/v1/generate."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.sampling.params import StructuredOutputsParams
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

URL = "/inference/v1/generate"


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"token_ids": [72, 105], **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"token_ids": [72, 105], **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def test_the_answer_has_every_field(connect: Any) -> None:
    engine = FakeEngine("xyz")
    answer = await post(connect(engine), request_id="mine", cache_salt="s",
                        sampling_params={"max_tokens": 2, "logprobs": 1})  # fmt: skip
    (choice,) = answer.pop("choices")
    assert answer == {
        "request_id": "mine",
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4,
                  "prompt_tokens_details": None, "completion_tokens_details": None},
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }  # fmt: skip
    logprobs = choice.pop("logprobs")["content"]
    assert choice == {
        "index": 0, "token_ids": [120, 121], "finish_reason": "length", "stop_reason": None,
    }  # fmt: skip
    assert [entry["token"] for entry in logprobs] == ["token_id:120", "token_id:121"]
    (request,) = engine.requests
    assert request.prompt == {"prompt_token_ids": [72, 105], "cache_salt": "s"}
    assert request.params.detokenize is False


async def test_ids_equal_those_of_completions(connect: Any) -> None:
    model = fake_served_model(default_sampling_params={"temperature": 0.3})
    engine = FakeEngine("größe", model=model)
    client = connect(engine)
    ids = (await post(client))["choices"][0]["token_ids"]
    same = await client.post(
        "/v1/completions", json={"prompt": [72, 105], "return_token_ids": True}
    )
    assert same.json()["choices"][0]["token_ids"] == ids
    first, second = (request.params for request in engine.requests)
    assert (first.temperature, first.max_tokens) == (second.temperature, second.max_tokens)


async def test_sampling_params_arrive(connect: Any) -> None:
    engine = FakeEngine("x")
    sent = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 3,
        "stop_token_ids": [5], "min_tokens": 1, "max_tokens": None, "ignore_eos": False,
        "allowed_token_ids": [7], "bad_words": ["no"], "logprobs": 0, "prompt_logprobs": 1,
    }  # fmt: skip
    answer = await post(
        connect(engine),
        sampling_params={
            **sent, "structured_outputs": {"regex": "a"}, "extra_args": {"k": [1, "a"]},
            "detokenize": True, "output_kind": 0, "skip_clone": False, "flat_logprobs": False,
            "stop": None, "logit_bias": {"4": 1.5},
        },
    )  # fmt: skip
    params = engine.requests[0].params
    assert {name: getattr(params, name) for name in sent} == sent
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    assert (params.extra_args, params.logit_bias) == ({"k": [1, "a"]}, {4: 1.5})
    assert len(answer["choices"]) == 2
    assert answer["prompt_logprobs"][0] is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": ["a"]}, "token_ids[0]"),
        ({"token_ids": [2**31]}, "token_ids[0]"),
        ({"features": {"image": "x"}}, "features"),
        ({"kv_transfer_params": {"tp_size": 65}}, "kv_transfer_params.tp_size"),
        ({"stream_options": {}}, "stream_options"),
        ({"priority": 1}, "priority"),
        ({"sampling_params": {"stop": "x"}}, "sampling_params.stop"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params.logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"logits_processors": []}}, "sampling_params.logits_processors"),
        ({"sampling_params": {"flat_logprobs": True}}, "sampling_params.flat_logprobs"),
        ({"sampling_params": {"extra_args": {"a": {"b": 1}}}}, "sampling_params.extra_args.a"),
        (
            {"sampling_params": {"prompt_logprobs": 1}, "stream": True},
            "sampling_params.prompt_logprobs",
        ),
        ({"sampling_params": {"max_tokens": 5000}}, "token_ids"),
    ],
)
async def test_refusals_name_the_field(connect: Any, body: Any, param: str) -> None:
    engine = FakeEngine("x")
    assert (await refused(connect(engine), **body))["param"] == param
    assert engine.requests == []


async def test_tokens_only(connect: Any) -> None:
    client = connect(FakeEngine("x"), tokens_only=True)
    await post(client)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/embeddings"):
        assert (await client.post(path, json={"prompt": "a"})).status_code == 404
    for path in ("/health", "/metrics", "/v1/models", "/version"):
        assert (await client.get(path)).status_code == 200


async def test_a_model_without_tokenizer(connect: Any) -> None:
    engine = FakeEngine("x", model=fake_served_model(has_tokenizer=False))
    assert (await post(connect(engine)))["choices"][0]["token_ids"][0] == 120
