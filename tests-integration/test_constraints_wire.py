"""Forms and forced calls through OpenAI's client, the server and the engine, with the demo model."""

from __future__ import annotations

import json

import jsonschema
import openai
import pytest
from servers import serving

HELLO = [{"role": "user", "content": "Hello!"}]
END = "2"
"""The token with which the demo model ends its turn."""
COMPACT = (
    "--structured-outputs-config.backend", "guidance",
    "--structured-outputs-config.disable_any_whitespace", "true",
)  # fmt: skip


def tool(name: str, parameters: dict, **more) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


WALK = tool(
    "walk",
    {
        "type": "object",
        "properties": {
            "path": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "maxItems": 3},
            "start": {"$ref": "#/properties/path/items"},
        },
        "required": ["path", "start"],
        "additionalProperties": False,
        "$defs": {
            "Point": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2]}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
)
WEATHER = tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in (WALK, WEATHER)}


@pytest.fixture(scope="module")
def client():
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", *COMPACT)
    with (
        serving(*words) as running,
        openai.OpenAI(base_url=running.api, api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, messages=HELLO, **options):
    options.setdefault("max_tokens", 600)
    return client.chat.completions.create(model="headrace-demo", messages=messages, **options)


def checked(calls) -> list[tuple[str, dict]]:
    """The calls' names and arguments; fails unless they follow their schemas."""
    found = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        found.append((call.function.name, arguments))
    return found


@pytest.mark.parametrize("tools", [[WALK, WEATHER], [WALK]])
def test_a_required_call_follows_its_schema(client, tools):
    answer = ask(
        client, tools=tools, tool_choice="required", parallel_tool_calls=False, n=8,
        temperature=2.0, seed=5,
    )  # fmt: skip
    for choice in answer.choices:
        assert len(checked(choice.message.tool_calls)) == 1
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_required_calls_are_many_at_most(client):
    """A model that never wants to end ends after sixteen calls, all of them whole."""
    (choice,) = ask(
        client, tools=[WEATHER], tool_choice="required", max_tokens=1000, temperature=0,
        logit_bias={END: -100},
    ).choices  # fmt: skip
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert len(checked(choice.message.tool_calls)) == 16


@pytest.mark.parametrize("name", ["walk", "get_weather"])
def test_named_calls_follow_their_schema(client, name):
    choice = {"type": "function", "function": {"name": name}}
    answer = ask(
        client, tools=[WALK, WEATHER], tool_choice=choice, n=8, temperature=2.0, seed=3
    )  # fmt: skip
    for one in answer.choices:
        ((called, _),) = checked(one.message.tool_calls)
        assert (called, one.finish_reason, one.message.content) == (name, "stop", None)


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "walk"}}])
def test_streamed_calls_equal_the_whole(client, choice):
    asked = {"tools": [WALK, WEATHER], "tool_choice": choice, "temperature": 1.0, "seed": 4}
    whole = ask(client, **asked).choices[0]
    calls: dict = {}
    reason = None
    for chunk in ask(client, stream=True, **asked):
        (part,) = chunk.choices
        reason = part.finish_reason or reason
        for piece in part.delta.tool_calls or []:
            call = calls.setdefault(piece.index, [piece.function.name, ""])
            call[1] += piece.function.arguments or ""
    assert reason == whole.finish_reason
    assert list(calls.values()) == [
        [c.function.name, c.function.arguments] for c in whole.message.tool_calls
    ]


def test_a_form_beside_free_calls(client):
    """The model calls where it would have called, and otherwise answers in the form."""
    form = {
        "type": "json_schema",
        "json_schema": {
            "name": "greeting",
            "schema": {
                "type": "object",
                "properties": {"kind": {"enum": ["greeting", "answer"]}},
                "required": ["kind"],
                "additionalProperties": False,
            },
        },
    }
    weather = [{"role": "user", "content": "What is the weather in Oslo?"}]
    strict = tool("get_weather", SCHEMAS["get_weather"], strict=True)
    called = ask(client, weather, tools=[strict], response_format=form, temperature=0).choices[0]
    assert checked(called.message.tool_calls) == [("get_weather", {"city": "Oslo"})]
    for seed in range(4):
        choice = ask(
            client, HELLO, tools=[strict], response_format=form, temperature=1.5, seed=seed
        ).choices[0]
        if choice.message.tool_calls:
            assert checked(choice.message.tool_calls)
        else:
            assert json.loads(choice.message.content)["kind"] in ("greeting", "answer")


def test_strict_tools_in_free_calls(client):
    strict = tool("get_weather", SCHEMAS["get_weather"], strict=True)
    weather = [{"role": "user", "content": "What is the weather in Paris?"}]
    free = ask(client, weather, tools=[WEATHER], temperature=0).choices[0].message.tool_calls
    assert json.loads(free[0].function.arguments) == {"city": "Paris"}
    held = ask(client, weather, tools=[strict], temperature=0).choices[0].message.tool_calls
    assert json.loads(held[0].function.arguments)["city"] in ("Oslo", "Rome")


def test_a_schema_that_cannot_be_served_names_the_field(client):
    bad = {"type": "object", "properties": {"a": {"type": "strnig"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(
            client,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": bad}},
        )
    assert caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=[tool("f", bad)], tool_choice="required")
    assert caught.value.param == "tools"


@pytest.mark.parametrize("own", [True, False])
def test_forced_calls_come_after_the_reasoning(own):
    """In the model's own format, and as JSON where the server knows no format."""
    words = ["--reasoning-parser", "qwen3", *COMPACT]
    if own:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serving(*words) as running, openai.OpenAI(base_url=running.api, api_key="x") as client:
        choice = ask(
            client,
            [{"role": "user", "content": "What is 12 + 30?"}],
            tools=[WALK, WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        ).choices[0]
    assert choice.message.reasoning
    assert checked(choice.message.tool_calls)
