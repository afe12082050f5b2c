"""Errors name places of the request as its client wrote it: what is there, or a key that is missing."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_server.errors.places import place_in, plain_place, told, written
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

HI = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "messages": [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stream_options": None,
    "vllm_xargs": {"str": ["a"]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "message", "role": "assistant", "content": "Well", "id": "m"},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": ""}]},
]  # fmt: skip
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]}]},
]  # fmt: skip
MESSAGES = {
    "model": "fake-model",
    "system": [{"type": "text", "text": "x"}],
    "messages": BLOCKS,
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
}
GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [HI, HI], "stop": ["x"]},
    "/v1/completions": {"prompt": [[1, 2]], "logit_bias": {"5": 1.0}, "stop": "x"},
    "/v1/responses": {
        "input": ITEMS,
        "text": {"format": {"type": "json_object"}},
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "metadata": {"a b": "c", "int": "d"},
        "include": ["reasoning.encrypted_content"],
    },
    "/v1/messages": {**MESSAGES, "max_tokens": 2000, "stop_sequences": ["x"], "metadata": {}},
    "/v1/messages/count_tokens": MESSAGES,
    "/tokenize": {"messages": HI, "documents": [{"a": "b"}]},
    "/detokenize": {"tokens": [5]},
}
POOLING = {
    "/v1/embeddings": (("embed",), {"input": ["a", "b"], "dimensions": 8}),
    "/pooling": (
        (
            "embed",
            "token_embed",
        ),
        {"input": [[1, 2]]},
    ),
    "/classify": (("classify",), {"messages": HI}),
    "/score": (
        (
            "score",
            "classify",
        ),
        {"text_1": "a", "text_2": ["b", {"text": "c"}]},
    ),
    "/rerank": (
        (
            "score",
            "classify",
        ),
        {"query": {"text": "a"}, "documents": ["b", {"text": "c"}], "rank_fields": ["text"]},
    ),
    "/v2/rerank": (
        (
            "score",
            "classify",
        ),
        {"query": "a", "documents": ["b", {"text": "c"}]},
    ),
    "/v2/embed": (
        ("embed",),
        {"texts": ["a"], "input_type": "search_query", "embedding_types": ["float"]},
    ),
}
WRONG: list[Any] = [5, 1.5, "?", True, [], {}, [5], [[]], {"?": 5}, {"type": "?"}]
_PLACE = re.compile(r"[A-Za-z_]\w*(?:\[\d+\]|\.[\w-]+)*")


def nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values within a value, but not its own."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, held in pairs:
        yield (*path, key)
        if isinstance(held, (dict, list)):
            yield from nodes(held, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A body with another value in one place; ``...``: without it."""
    made = copy.deepcopy(body)
    at = made
    for part in path[:-1]:
        at = at[part]
    if value is ...:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return made


def places(message: str) -> Iterator[str]:
    """The places that a message names: at its beginning, and behind each semicolon."""
    for number, line in enumerate(message.split("; ")):
        found = _PLACE.match(line)
        after = line[found.end() :] if found else ""
        is_place = found and after.startswith((":", " = ", " and "))
        if is_place and found and (number == 0 or "[" in found[0] or "." in found[0]):
            yield found[0]


def exists(place: str, body: Any) -> bool:
    """True if a place is in the body, or is a missing key of an object in it."""
    parts = [int(p[1:-1]) if p[0] == "[" else p for p in re.findall(r"\[\d+\]|[^.\[]+", place)]
    at = body
    for index, part in enumerate(parts):
        is_key = isinstance(at, dict) and part in at
        if is_key or (isinstance(at, list) and isinstance(part, int) and part < len(at)):
            at = at[part]
        else:
            return isinstance(at, dict) and isinstance(part, str) and index + 1 == len(parts)
    return True


async def check(client: Any, wire: str, body: dict[str, Any]) -> int:
    """Send bodies with one fault each; the number that was refused."""
    answer = await client.post(wire, json=body)
    assert answer.status_code == 200, answer.text
    refused = 0
    for path in nodes(body):
        for value in (..., *WRONG):
            sent = changed(body, path, value)
            answer = await client.post(wire, json=sent)
            assert answer.status_code < 500, (path, value, answer.text)
            if answer.status_code != 400:
                continue
            refused += 1
            told = answer.json()
            message = told["message"] if wire.startswith("/v2/") else told["error"]["message"]
            param = told.get("error", {}).get("param")
            for place in {*places(message), *([param] if param else [])}:
                assert exists(place, sent), (json.dumps(sent), place, message)
    return refused


PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


@pytest.mark.parametrize("wire", GENERATING)
async def test_places_of_generating_wires(connect: Any, wire: str) -> None:
    client = connect(FakeEngine("{}"), **PARSERS, reasoning_parser="qwen3")
    assert await check(client, wire, GENERATING[wire]) > 5


@pytest.mark.parametrize("wire", POOLING)
async def test_places_of_pooling_wires(connect: Any, wire: str) -> None:
    tasks, body = POOLING[wire]
    engine = FakeEngine(model=fake_pooling_model(*tasks, embedding_size=8))
    assert await check(connect(engine), wire, body) > 5


@pytest.mark.parametrize(
    ("body", "place", "message"),
    [
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content",
         "Input should be a valid string or a valid list"),
        ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": ""}]},
         "input[0].call_id", "String should have at least 1 character"),
        ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]},
         "input[0].name", "Field required"),
        ({"input": [{"type": "reasoning", "summary": [{"text": 5}]}]},
         "input[0].summary[0].text", "Input should be a valid string"),
        ({"input": [5]}, "input[0]",
         "Input should be a valid dictionary or object to extract fields from"),
        ({"input": 5}, "input", "Input should be a valid string or a valid list"),
        ({"input": "x", "metadata": {"a b": 5}}, "metadata.a b", "Input should be a valid string"),
        ({"input": "x", "tool_choice": 5}, "tool_choice",
         "Input should be a valid string or a valid dictionary"),
    ],
)  # fmt: skip
async def test_places_of_items(connect: Any, body: Any, place: str, message: str) -> None:
    error = (await connect().post("/v1/responses", json=body)).json()["error"]
    assert (error["param"], error["message"]) == (place, f"{place}: {message}")


def test_a_location_is_followed_through_the_request() -> None:
    body = {"input": [{"role": "user", "str": {"str": 1}}]}
    location = ("input", "list[x]", 0, "message", "str", "str")
    assert place_in(body, location, "int_type") == ("input", 0, "str", "str")
    assert place_in(body, (*location[:4], "content"), "missing") == ("input", 0, "content")
    assert place_in(body, (*location[:4], "content"), "list_type") == ("input", 0)
    assert place_in([], ("x", 0), "int_type") == ()
    assert written(("input", 0, "a" * 80)) == "input[0]." + "a" * 64
    assert plain_place(("temperature[]", 0, "float")) == ("temperature[]",)


def test_problems_are_bounded_and_each_place_is_told_once() -> None:
    def problem(*location: str | int, kind: str = "string_type") -> dict[str, Any]:
        return {"loc": ("body", *location), "type": kind, "msg": "Input should be a string"}

    body = {"a": [1] * 1000}
    found = told([problem("a"), *(problem("a", i) for i in range(1000))], body)
    assert [place for place, _ in found[:2]] == ["a[0]", "a[1]"]
    assert len(found) == 255
    assert told([problem("a"), problem("a")], body) == [("a", "Input should be a string")]
