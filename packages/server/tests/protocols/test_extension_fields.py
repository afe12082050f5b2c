"""Fields beside those of a protocol: each wire takes them as chats do, or refuses them by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace_server.protocols.anthropic.protocol import CountTokensRequest, MessagesRequest
from headrace_server.protocols.base import RequestBody
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.bodies.completions import CompletionRequest
from headrace_server.protocols.openai.bodies.generate import GenerateRequest, TokenSampling
from headrace_server.protocols.openai.bodies.sampling import CHAT_EXTENSIONS
from headrace_server.protocols.responses.protocol import ResponsesRequest
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
CLAUDE = {"model": "fake-model", "max_tokens": 40, "messages": HI}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_completion_tokens": 40},
    RESPONSES: {"input": "Hi", "max_output_tokens": 40},
    MESSAGES: CLAUDE,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
EXTENSIONS: dict[str, Any] = {
    "top_k": 5, "min_p": 0.2, "repetition_penalty": 1.5, "frequency_penalty": 0.5,
    "presence_penalty": -0.5, "logit_bias": {"97": 3}, "seed": 7, "stop_token_ids": [65],
    "min_tokens": 2, "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False,
    "truncate_prompt_tokens": 9, "allowed_token_ids": [97, 98], "bad_words": ["x"],
    "structured_outputs": {"regex": "a+"}, "json_schema": SCHEMA, "grammar": "root ::= \"a\"",
    "regex": "a+", "ebnf": "root ::= \"a\"", "structural_tag": {"format": {"type": "any_text"}},
    "guided_json": SCHEMA, "guided_regex": "a+", "guided_choice": ["a", "b"],
    "guided_grammar": "root ::= \"a\"", "guided_json_object": True,
    "guided_whitespace_pattern": " ", "guided_decoding_backend": "auto", "priority": 3,
    "cache_salt": "s", "headrace_xargs": {"a": 1}, "vllm_xargs": {"b": [1, 2]},
    "chat_template": "t", "chat_template_kwargs": {"k": "v"}, "documents": [{"text": "d"}],
    "add_special_tokens": True,
}  # fmt: skip
BESIDE = {"guided_whitespace_pattern": {"guided_json": SCHEMA}}


def test_all_extensions_are_tried() -> None:
    assert EXTENSIONS.keys() == set(CHAT_EXTENSIONS)


@pytest.mark.parametrize("name", EXTENSIONS)
async def test_every_wire_runs_the_same_request(connect: Any, name: str) -> None:
    engine = FakeEngine("aaaa", model=fake_served_model(priority_scheduling=True))
    client = connect(engine, trust_request_chat_template=True)
    fields = {name: EXTENSIONS[name], **BESIDE.get(name, {})}
    found = []
    for url, body in BODIES.items():
        plain = await client.post(url, json=body)
        assert plain.status_code == 200, plain.text
        answer = await client.post(url, json={**body, **fields})
        assert answer.status_code == 200, (url, answer.text)
        asked, usual = engine.requests[-1], engine.requests[-2]
        assert (asked.params, asked.priority, asked.prompt) != (
            usual.params, usual.priority, usual.prompt
        ) or name in ("guided_decoding_backend", "spaces_between_special_tokens"), url  # fmt: skip
        found.append((asked.params, asked.priority, asked.prompt))
    for other in found[1:]:
        params, priority, prompt = other
        assert priority == found[0][1]
        assert params.structured_outputs == found[0][0].structured_outputs
        assert params.extra_args == found[0][0].extra_args
        assert params == found[0][0]
        for field in ("cache_salt", "chat_template", "documents", "add_special_tokens"):
            assert getattr(prompt, field) == getattr(found[0][2], field)
        if name == "chat_template_kwargs":
            assert prompt.chat_template_kwargs["k"] == "v"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"regex": "a+", "guided_regex": "b"}, "guided_regex"),
        ({"regex": ""}, "regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx"),
        ({"min_tokens": 50}, "min_tokens"), ({"min_p": 2}, "min_p"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"chat_template": "t"}, "chat_template"), ({"priority": 1}, "priority"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("url", [RESPONSES, MESSAGES])
async def test_faults_are_named(connect: Any, url: str, given: Any, param: str) -> None:
    answer = await connect().post(url, json={**BODIES[url], **given})
    assert answer.status_code == 400, answer.text
    assert param.partition("[")[0] in answer.json()["error"]["message"]
    if url == RESPONSES:
        assert answer.json()["error"]["param"] == param


FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("url", "form", "own"),
    [
        (RESPONSES, {"text": {"format": FORM}}, "text.format"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
         "output_config.format"),
    ],
)  # fmt: skip
async def test_two_constraints_are_one_too_many(
    connect: Any, url: str, form: Any, own: str
) -> None:
    for other in ({"guided_json": SCHEMA}, {"structured_outputs": {"regex": "a"}}):
        (name,) = other
        answer = await connect().post(url, json={**BODIES[url], **form, **other})
        assert answer.status_code == 400, answer.text
        assert f"{name}: cannot be combined with {own}" in answer.json()["error"]["message"]
    unforced = {"text": {"format": {"type": "text"}}} if url == RESPONSES else {}
    answer = await connect().post(url, json={**BODIES[url], **unforced, "regex": "a+"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": SCHEMA}, "guided_json"), ({"regex": "a+"}, "regex"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"text": {"format": FORM}}, "text.format"),
    ],
)  # fmt: skip
async def test_what_the_engine_refuses_is_spelled_as_it_was_sent(
    connect: Any, given: Any, param: str
) -> None:
    from headrace_core.errors import RequestError

    error = RequestError(
        "structured_outputs.json: cannot be served", param="structured_outputs.json"
    )
    client = connect(FakeEngine(reject=error))
    told = (await client.post(RESPONSES, json={**BODIES[RESPONSES], **given})).json()["error"]
    assert told["param"] == param
    assert told["message"] == f"{param}: cannot be served"


# Nothing of a chat is overlooked

WIRES: dict[str, type[RequestBody]] = {
    "chat": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest,
    "messages": MessagesRequest,
}  # fmt: skip
URLS = {"completions": TEXT, "responses": RESPONSES, "messages": MESSAGES, "chat": CHAT}
NOTHING = {
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "service_tier", "metadata", "store", "prediction",
}  # fmt: skip
"""Fields that have no effect on chats either."""


@pytest.mark.parametrize("wire", ["completions", "responses", "messages"])
def test_each_field_of_a_chat_is_taken_or_refused(wire: str) -> None:
    kind = WIRES[wire]
    ours = {name for name in ChatRequest.model_fields if name not in NOTHING}
    overlooked = ours - kind.model_fields.keys() - kind.refused.keys()
    assert not overlooked


def test_sampling_fields_of_tokens_belong_into_their_object() -> None:
    assert TokenSampling.model_fields.keys() <= GenerateRequest.refused.keys()


@pytest.mark.parametrize(
    ("url", "body", "field", "said"),
    [
        (RESPONSES, {"input": "a", "prompt_logprobs": 1}, "prompt_logprobs", "no field"),
        (RESPONSES, {"input": "a", "use_beam_search": True}, "use_beam_search", "/v1/chat"),
        (RESPONSES, {"input": "a", "logprobs": True}, "logprobs", "include"),
        (RESPONSES, {"input": "a", "verbosity": "low"}, "verbosity", "text.verbosity"),
        (MESSAGES, {**CLAUDE, "n": 2}, "n", "one"),
        (MESSAGES, {**CLAUDE, "response_format": {"type": "text"}}, "response_format", "output_config"),
        (MESSAGES, {**CLAUDE, "max_completion_tokens": 3}, "max_completion_tokens", "max_tokens"),
        (MESSAGES, {**CLAUDE, "kv_transfer_params": {}}, "kv_transfer_params", "not supported"),
        (MESSAGES + "/count_tokens", {"model": "fake-model", "messages": HI,
                                      "truncate_prompt_tokens": 1}, "truncate_prompt_tokens", "whole"),
        (TEXT, {"prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens", "max_tokens"),
        (TEXT, {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "/v1/chat"),
        (TEXT, {"prompt": "a", "tools": [{"type": "function"}]}, "tools", "/v1/chat"),
        ("/inference/v1/generate", {"token_ids": [72], "temperature": 0}, "temperature",
         "sampling_params"),
    ],
)  # fmt: skip
async def test_refusals_say_what_to_do(
    connect: Any, url: str, body: Any, field: str, said: str
) -> None:
    answer = await connect().post(url, json=body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert told["message"].startswith(f"{field}: ")
    assert said in told["message"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (RESPONSES, {"input": "a", "n": 1, "best_of": 1, "echo": False, "logprobs": False}),
        (MESSAGES, {**CLAUDE, "n": 1, "parallel_tool_calls": True, "prompt_logprobs": None}),
        (TEXT, {"prompt": "a", "tools": [], "chat_template_kwargs": {}, "parallel_tool_calls": True}),
        ("/inference/v1/generate", {"token_ids": [72], "n": None}),
    ],
)  # fmt: skip
async def test_values_that_ask_for_nothing_are_taken(connect: Any, url: str, body: Any) -> None:
    answer = await connect(strict_requests=True).post(url, json=body)
    assert answer.status_code == 200, answer.text


async def test_tokens_are_counted_of_the_prompt_that_runs(connect: Any) -> None:
    client = connect(trust_request_chat_template=True)
    body = {"model": "fake-model", "messages": HI}
    for name in ("chat_template", "chat_template_kwargs", "documents", "add_special_tokens"):
        assert name in CountTokensRequest.model_fields
        answer = await client.post(
            MESSAGES + "/count_tokens", json={**body, name: EXTENSIONS[name]}
        )
        assert answer.status_code == 200, answer.text


PAGE = Path(__file__).parents[4] / "docs" / "serving" / "fields.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not beside the package")
def test_the_page_says_which_wire_takes_which() -> None:
    rows = re.findall(r"^\| (`.+) \| (.+) \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.M)
    listed = set()
    for names, *cells in rows:
        for name in re.findall(r"`(\w+)`", names):
            listed.add(name)
            for wire, cell in zip(WIRES, cells, strict=True):
                kind = WIRES[wire]
                is_taken = name in kind.model_fields
                assert cell.startswith("yes") == is_taken, (name, wire)
                assert is_taken or name in kind.refused or cell == "none", (name, wire)
    assert {
        n for n in ChatRequest.model_fields if n not in NOTHING | {"messages", "model"}
    } <= listed


@pytest.mark.parametrize("wire", list(WIRES))
def test_idle_fields_are_known_on_every_wire(wire: str) -> None:
    assert NOTHING - {"store"} <= WIRES[wire].model_fields.keys()


@pytest.mark.parametrize("wire", list(WIRES))
def test_what_neighbours_call_otherwise_is_taken_or_refused(wire: str) -> None:
    """A limit or a form that is overlooked would be a wrong answer."""
    theirs = {
        "stop", "stop_sequences", "max_tokens", "max_completion_tokens", "max_output_tokens",
        "response_format", "text", "output_config", "output_format",
    }  # fmt: skip
    kind = WIRES[wire]
    assert theirs <= kind.model_fields.keys() | kind.refused.keys()


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
FOUND = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 14579}


@pytest.mark.parametrize("url", [CHAT, TEXT, "/inference/v1/generate"])
async def test_transfers_between_engines(connect: Any, url: str) -> None:
    """What a proxy says of them reaches the engine, and what the engine answers reaches the proxy."""
    engine = FakeEngine("x", kv_transfer_params=FOUND)
    prompt = {CHAT: {"messages": HI}, TEXT: {"prompt": "a"}}.get(url, {"token_ids": [72]})
    answer = await connect(engine).post(url, json={**prompt, "kv_transfer_params": PREFILL})
    assert answer.status_code == 200, answer.text
    assert answer.json()["kv_transfer_params"] == FOUND
    given = {"do_remote_decode": True, "do_remote_prefill": False}
    assert engine.requests[-1].params.extra_args == {"kv_transfer_params": given}
    body = {**prompt, "kv_transfer_params": PREFILL, "stream": True}
    refused = await connect(engine).post(url, json=body)
    assert refused.status_code == 400
    assert "not available with stream" in refused.json()["error"]["message"]
    await connect(engine).post(url, json={**prompt, "kv_transfer_params": {}})
    assert engine.requests[-1].params.extra_args is None
