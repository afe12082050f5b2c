"""POST /v1/chat/completions/render and /v1/completions/render, and what generating from them gives."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_testing.fakes.engine import FakeEngine, fake_served_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
LONG = "context_length_exceeded"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


async def post(client: Any, path: str, body: Any, status: int = 200) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


SAMPLING: Any = [
    {}, {"temperature": 0, "max_tokens": 3, "seed": 7, "ignore_eos": True},
    {"n": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "logit_bias": {"97": -5}, "min_tokens": 1},
    {"structured_outputs": {"choice": ["a", "b"]}, "stop_token_ids": [65], "bad_words": ["x"]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}},
    {"priority": 3, "cache_salt": "s", "prompt_logprobs": 1, "vllm_xargs": {"k": [1, 2]}},
    {"stream": True, "stream_options": {"include_usage": True}, "truncate_prompt_tokens": 4},
]  # fmt: skip


@pytest.mark.parametrize("asked", SAMPLING)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_generating_from_a_rendering_is_the_same_request(
    connect: Any, path: str, asked: Any
) -> None:
    defaults = {"temperature": 0.3, "top_k": 20, "max_tokens": 9}
    model = fake_served_model(default_sampling_params=defaults, priority_scheduling=True)
    engine = FakeEngine("xyz", model=model)
    client = connect(engine)
    body = {**asked, **(CHAT if "chat" in path else {"prompt": "Hello"})}
    rendered = await post(client, path + "/render", body)
    assert not engine.requests
    (rendered,) = [rendered] if "chat" in path else rendered
    assert (await client.post(path, json=body)).status_code == 200
    answer = await client.post("/inference/v1/generate", json=rendered)
    assert answer.status_code == 200, answer.text
    direct, other = engine.requests
    for request in (direct, other):
        request.params.detokenize = True
    assert other.params == direct.params
    assert (other.priority, other.prompt.get("cache_salt")) == (
        direct.priority, body.get("cache_salt")
    )  # fmt: skip
    tokens = await engine.tokenize(direct.prompt, add_special_tokens=direct.add_special_tokens)
    assert other.prompt["prompt_token_ids"] == list(tokens.token_ids) == rendered["token_ids"]


async def test_each_prompt_of_a_completion_is_a_request(connect: Any) -> None:
    body = {"prompt": ["a", "bc"], "request_id": "mine", "add_special_tokens": False}
    found = await post(connect(), "/v1/completions/render", body)
    assert [(one["request_id"], one["token_ids"]) for one in found] == [
        ("mine-0", [97]), ("mine-1", [98, 99])
    ]  # fmt: skip
    (one,) = await post(connect(), "/v1/completions/render", {"prompt": [5, 6]})
    assert one["token_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {**CHAT, "stop": ["x"]}, "stop"),
        ("/v1/chat/completions", {**CHAT, "use_beam_search": True}, "use_beam_search"),
        ("/v1/chat/completions", {**CHAT, "model": "other"}, "model"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt_embeds": "AA=="}, "prompt_embeds"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {}, "prompt"),
    ],
)  # fmt: skip
async def test_refusals(connect: Any, path: str, body: Any, param: str) -> None:
    status = 404 if param == "model" else 400
    told = await post(connect(), path + "/render", body, status)
    assert told["error"]["param"] == param, told


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        ("/v1/completions", {"prompt": "", "add_special_tokens": False}, "prompt", 400),
        ("/v1/completions", {"prompt": ["a", ""], "add_special_tokens": False}, "prompt", 400),
        ("/v1/completions", {"prompt": "x" * 4096}, "prompt", LONG),
        ("/v1/completions", {"prompt": "x" * 90, "max_tokens": 4090}, "max_tokens", LONG),
        ("/v1/completions", {"prompt": "x", "truncate_prompt_tokens": 5000},
         "truncate_prompt_tokens", 400),
        ("/v1/completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 3}, "min_tokens", 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 5000}]}, "messages",
         LONG),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 4095}, "max_completion_tokens",
         LONG),
    ],
)  # fmt: skip
async def test_what_is_not_generated_is_not_rendered(
    connect: Any, path: str, body: Any, param: str, code: Any
) -> None:
    client = connect()
    told = (await post(client, path + "/render", body, 400))["error"]
    assert told["param"] == param
    assert told["code"] == code


async def test_a_prompt_that_truncation_makes_fit_is_rendered(connect: Any) -> None:
    for keep in (-1, 7):
        body = {"prompt": "x" * 5000, "truncate_prompt_tokens": keep}
        (one,) = await post(connect(), "/v1/completions/render", body)
        assert one["sampling_params"]["truncate_prompt_tokens"] == keep


async def test_forced_calls_keep_their_grammar(connect: Any) -> None:
    client = connect(enable_auto_tool_choice=True, tool_call_parser="hermes")
    body = {**CHAT, "tools": TOOLS, "tool_choice": "required"}
    rendered = await post(client, "/v1/chat/completions/render", body)
    assert rendered["sampling_params"]["structured_outputs"]
    assert (await client.post("/inference/v1/generate", json=rendered)).status_code == 200


async def test_a_server_for_tokens_only_has_none(connect: Any) -> None:
    answer = await connect(tokens_only=True).post("/v1/completions/render", json={"prompt": "a"})
    assert answer.status_code == 404
