"""Roles, forms beside forced calls, and calls in plain JSON: through a real engine, on every wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import jsonschema
import pytest
from posted import post, stream
from servers import RunningServer, serving

MODEL = "headrace-demo"
HI = [{"role": "user", "content": "Hi"}]
ARGUMENTS = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FORM = {"type": "object", "properties": {"zebra": {"enum": ["a"]}}, "required": ["zebra"],
        "additionalProperties": False}  # fmt: skip
WEATHER = {"name": "weather", "parameters": ARGUMENTS}
NOW = {
    "name": "now",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
SCHEMAS = {one["name"]: one["parameters"] for one in (WEATHER, NOW)}
SAMPLED = {"temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def enforced() -> Iterator[RunningServer]:
    pytest.importorskip("lmformatenforcer")
    words = ("--structured-outputs-config.backend", "lm-format-enforcer",
             "--structured-outputs-config.disable_fallback", "true")  # fmt: skip
    with serving(*words) as running:
        yield running


def chat(choice: str, form: bool) -> tuple[str, dict[str, Any]]:
    asked: Any = {"type": "function", "function": {"name": "weather"}}
    body = {"model": MODEL, "messages": HI, "max_tokens": 300, **SAMPLED,
            "tools": [{"type": "function", "function": one} for one in (WEATHER, NOW)],
            "tool_choice": asked if choice == "named" else choice}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": FORM}}
    return "/v1/chat/completions", body | ({"response_format": wanted} if form else {})


def responses(choice: str, form: bool) -> tuple[str, dict[str, Any]]:
    asked: Any = {"type": "function", "name": "weather"}
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 300, **SAMPLED,
            "tools": [{"type": "function", **one} for one in (WEATHER, NOW)],
            "tool_choice": asked if choice == "named" else choice}  # fmt: skip
    wanted = {"format": {"type": "json_schema", "name": "n", "schema": FORM}}
    return "/v1/responses", body | ({"text": wanted} if form else {})


def messages(choice: str, form: bool) -> tuple[str, dict[str, Any]]:
    asked = {"required": {"type": "any"}, "none": {"type": "none"}}
    own = [{"name": one["name"], "input_schema": one["parameters"]} for one in (WEATHER, NOW)]
    body = {"model": MODEL, "messages": HI, "max_tokens": 300, **SAMPLED, "tools": own,
            "tool_choice": asked.get(choice, {"type": "tool", "name": "weather"})}  # fmt: skip
    wanted = {"format": {"type": "json_schema", "schema": FORM}}
    return "/v1/messages", body | ({"output_config": wanted} if form else {})


WIRES = [chat, responses, messages]


def found(path: str, answer: Any) -> tuple[list[tuple[str, Any]], str]:
    """Calls and text of a whole answer."""
    if path == "/v1/messages":
        blocks = answer["content"]
        calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        return calls, "".join(b["text"] for b in blocks if b["type"] == "text")
    if path == "/v1/responses":
        calls = [(i["name"], json.loads(i["arguments"]))
                 for i in answer["output"] if i["type"] == "function_call"]  # fmt: skip
        texts = [
            p["text"] for i in answer["output"] if i["type"] == "message" for p in i["content"]
        ]
        return calls, "".join(texts)
    said = answer["choices"][0]["message"]
    calls = [c["function"] for c in said.get("tool_calls") or []]
    return [(c["name"], json.loads(c["arguments"])) for c in calls], said["content"] or ""


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("wire", WIRES)
def test_a_forced_call_holds_beside_a_form(server: RunningServer, wire: Any, choice: str) -> None:
    """The form is that of texts, and an answer that must call has none: the very same answer comes."""
    path, body = wire(choice, True)
    calls, text = found(path, post(server.url + path, body))
    assert (calls, text) == found(path, post(server.url + path, wire(choice, False)[1]))
    assert (bool(calls), text) == (True, "")
    for name, arguments in calls:
        jsonschema.validate(arguments, SCHEMAS[name])
    events = stream(server.url + path, body)
    told = "".join(map(json.dumps, events))
    assert all(name in told for name, _ in calls)
    assert "zebra" not in "".join(json.dumps(event.get("delta")) for event in events)
    assert "output_text.delta" not in told
    assert "text_delta" not in told


@pytest.mark.parametrize("wire", WIRES)
def test_the_form_holds_where_no_call_is_forced(server: RunningServer, wire: Any) -> None:
    path, body = wire("none", True)
    calls, text = found(path, post(server.url + path, body))
    assert (calls, json.loads(text)) == ([], {"zebra": "a"})


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("wire", WIRES)
def test_calls_in_plain_json_with_lm_format_enforcer(
    enforced: RunningServer, wire: Any, choice: str
) -> None:
    path, body = wire(choice, False)
    for seed in range(3):
        calls, text = found(path, post(enforced.url + path, body | {"seed": seed}))
        assert text == ""
        assert 1 <= len(calls) <= (16 if choice == "required" else 1)
        for name, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[name])


def test_what_lm_format_enforcer_cannot_hold_is_refused_by_its_place(
    enforced: RunningServer,
) -> None:
    path, body = chat("required", False)
    days = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    body["tools"].append({"type": "function", "function": {"name": "days", "parameters": days}})
    answer = httpx2.post(enforced.url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert "tools[2].function.parameters#/properties/days" in answer.json()["error"]["message"]


ROLES = [
    ("/v1/chat/completions", "messages", "messages[0].role"),
    ("/v1/chat/completions/batch", "messages", "messages[0][0].role"),
    ("/tokenize", "messages", "messages[0].role"),
    ("/v1/responses", "input", "input[0].role"),
    ("/v1/messages", "messages", "messages[0].role"),
    ("/v1/messages/count_tokens", "messages", "messages[0].role"),
]


@pytest.mark.parametrize("role", ["usr", "User", "sytem"])
@pytest.mark.parametrize(("path", "field", "place"), ROLES)
def test_a_misspelled_role_is_refused(
    server: RunningServer, path: str, field: str, place: str, role: str
) -> None:
    conversation: Any = [{"role": role, "content": "Hi"}]
    body = {"model": MODEL, field: [conversation] if path.endswith("/batch") else conversation}
    limit = {"max_tokens": 2} if path in ("/v1/chat/completions", "/v1/messages") else {}
    answer = httpx2.post(server.url + path, json=body | limit, timeout=60)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith(place)
    near = "system" if role == "sytem" else "user"
    assert f"did you mean {near!r}?" in message


def test_a_role_of_the_client_s_own_reaches_the_template(server: RunningServer) -> None:
    conversation = [*HI, {"role": "critic", "content": "Too short."}]
    body = {"model": MODEL, "messages": conversation, "max_tokens": 2}
    post(server.url + "/v1/chat/completions", body)
    tokens = post(server.url + "/tokenize", {"messages": conversation})["tokens"]
    prompt = post(server.url + "/detokenize", {"tokens": tokens})["prompt"]
    assert "critic" in prompt
    assert "Too short." in prompt
