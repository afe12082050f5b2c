"""Names of tools: one rule on every wire, and no name twice."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_testing.fakes.engine import FakeEngine, fake_served_model

PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {}}


def nested(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def flat(name: Any) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA}


def anthropic(name: Any) -> dict[str, Any]:
    return {"name": name, "input_schema": SCHEMA}


WIRES = {
    "/v1/chat/completions": ({"messages": HI}, nested, "function.name"),
    "/v1/chat/completions/batch": ({"messages": [HI]}, nested, "function.name"),
    "/v1/chat/completions/render": ({"messages": HI}, nested, "function.name"),
    "/tokenize": ({"messages": HI}, nested, "function.name"),
    "/v1/responses": ({"input": "Hi"}, flat, "name"),
    "/v1/messages": ({"messages": HI, "max_tokens": 20}, anthropic, "name"),
    "/v1/messages/count_tokens": ({"messages": HI}, anthropic, "name"),
}
EACH_WIRE = pytest.mark.parametrize("path", WIRES)


async def call(connect: Any, path: str, names: list[Any], **more: Any) -> tuple[int, str]:
    body, make, _ = WIRES[path]
    body = {"model": "fake-model", **body, "tools": [make(name) for name in names], **more}
    answer = await connect(FakeEngine("Hi"), **PARSERS).post(path, json=body)
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"][
        "message"
    ]


@EACH_WIRE
@pytest.mark.parametrize("name", ["f", "a" * 256, "repo.read-file_2", "größe", "ns/tool:1", "1st"])
async def test_names_that_are_taken(connect: Any, path: str, name: str) -> None:
    assert await call(connect, path, ["x", name]) == (200, "")


@EACH_WIRE
@pytest.mark.parametrize("name", ["", "a" * 257, "a b", "a\n", "f()", '"f"', "<f>", "a=b", "\x00"])
async def test_names_that_are_refused(connect: Any, path: str, name: str) -> None:
    status, message = await call(connect, path, ["x", name])
    place = f"tools[1].{WIRES[path][2]} = {name[:64]!r}: "
    assert status == 400
    assert place + "must be a string of 1 to 256 printable characters" in message


@EACH_WIRE
async def test_a_name_of_another_type_is_refused(connect: Any, path: str) -> None:
    status, message = await call(connect, path, [5])
    assert status == 400
    assert "tools[0]" in message


@EACH_WIRE
async def test_a_name_twice_is_refused(connect: Any, path: str) -> None:
    field = WIRES[path][2]
    message = (
        f"tools[1].{field} and tools[3].{field} are both 'f': each tool must have a unique name"
    )
    for more in ({}, {"tool_choice": "none"} if path == "/v1/responses" else {}):
        status, told = await call(connect, path, ["a", "f", "b", "f"], **more)
        assert (status, told) == (400, message)


async def test_a_name_twice_is_refused_before_tools_are_chosen(connect: Any) -> None:
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}
    status, told = await call(connect, "/v1/responses", ["a", "f", "f"], tool_choice=choice)
    assert status == 400
    assert "tools[1].name and tools[2].name are both 'f'" in told


async def test_places_count_tools_that_are_left_out(connect: Any) -> None:
    tools = [{"type": "web_search"}, nested("f"), nested("f")]
    body = {"messages": HI, "tools": tools}
    answer = await connect(FakeEngine("Hi"), **PARSERS).post("/v1/chat/completions", json=body)
    assert "tools[1].function.name and tools[2].function.name" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([nested("f"), nested("f")],
         "messages[1].tools[0].function.name and messages[1].tools[1].function.name are both 'f'"),
        ([nested("a b")], "messages[1].tools[0].function.name = 'a b': must be"),
        ([{"type": "function"}], "messages[1].tools[0]: must be"),
        (5, "messages[1].tools: must be a list"),
    ],
)  # fmt: skip
async def test_tools_of_a_developer_message(connect: Any, tools: Any, words: str) -> None:
    model = fake_served_model(architecture="GptOssForCausalLM")
    body = {"messages": [*HI, {"role": "developer", "content": "x", "tools": tools}, *HI]}
    answer = await connect(FakeEngine("Hi", model=model)).post("/v1/chat/completions", json=body)
    assert words in answer.json()["error"]["message"]
