"""OpenAI's own client against a running server: structured answers, tools, streams of both."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from headrace_testing.fakes.engine import FakeEngine

HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(server: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


class Step(pydantic.BaseModel):
    what: str
    seconds: float | None = None


class Plan(pydantic.BaseModel):
    """A nested model with a list."""

    steps: list[Step]
    note: str


class Weather(pydantic.BaseModel):
    """Look at the sky."""

    city: str


PLAN = '{"steps": [{"what": "größe", "seconds": 1.5}, {"what": "b", "seconds": null}], "note": "n"}'


async def test_parsed_answers(live: Any) -> None:
    engine = FakeEngine(PLAN, tokens_per_output=5)
    server = await live(engine)
    async with client_of(server) as client:
        answer = await client.chat.completions.parse(
            model="fake-model", messages=HI, response_format=Plan
        )
        parsed = answer.choices[0].message.parsed
        assert parsed is not None
        assert [step.seconds for step in parsed.steps] == [1.5, None]
        schema = engine.requests[0].params.structured_outputs.json  # type: ignore[union-attr]
        assert schema["$defs"]["Step"]["additionalProperties"] is False  # type: ignore[index,call-overload]
        async with client.chat.completions.stream(
            model="fake-model", messages=HI, response_format=Plan
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed


@pytest.mark.parametrize("forced", ["required", "named", "auto"])
async def test_tools(live: Any, forced: str) -> None:
    call = '<tool_call>{"name": "Weather", "arguments": {"city": "東京"}}</tool_call>'
    reply, choice, reason = {
        "required": (
            call,
            "required",
            "tool_calls",
        ),
        "named": (call, {"type": "function", "function": {"name": "Weather"}}, "stop"),
        "auto": (call, "auto", "tool_calls"),
    }[forced]
    engine = FakeEngine(reply, tokens_per_output=3)
    server = await live(engine, enable_auto_tool_choice=True, tool_call_parser="hermes")
    asked: Any = {
        "model": "fake-model",
        "messages": HI,
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": choice,
    }
    async with client_of(server) as client:
        whole = await client.chat.completions.create(**asked)
        async with client.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        parsed = await client.chat.completions.parse(**asked)
    for answer in (whole, streamed, parsed):
        assert answer.choices[0].finish_reason == reason
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "Weather",
            {"city": "東京"},
        )
        assert call.id
    found = parsed.choices[0].message.tool_calls
    assert found is not None
    assert found[0].function.parsed_arguments == Weather(city="東京")


async def test_reasoning_between_calls_goes_back(live: Any) -> None:
    """The client appends the message as it came; the template sees reasoning and arguments."""
    engine = FakeEngine(
        '<think>why</think><tool_call>{"name": "Weather", "arguments": {"city": "x"}}</tool_call>'
    )
    server = await live(
        engine, enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    tools: Any = [openai.pydantic_function_tool(Weather)]
    async with client_of(server) as client:
        first = await client.chat.completions.create(model="fake-model", messages=HI, tools=tools)
        message = first.choices[0].message
        assert message.reasoning == "why"  # type: ignore[attr-defined]
        (call,) = message.tool_calls or ()
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        await client.chat.completions.create(
            model="fake-model", messages=[*HI, message, result], tools=tools
        )
    prompt: Any = engine.requests[1].prompt
    said = prompt.messages[1]
    assert said["reasoning"] == said["reasoning_content"] == "why"
    assert said["tool_calls"][0]["function"]["name"] == "Weather"
    assert prompt.messages[2]["tool_call_id"] == call.id


async def test_constraints_through_extra_body(live: Any) -> None:
    engine = FakeEngine("yes")
    server = await live(engine)
    async with client_of(server) as client:
        await client.completions.create(
            model="fake-model", prompt="a", extra_body={"structured_outputs": {"choice": ["yes"]}}
        )
        assert engine.requests[0].params.structured_outputs.choice == ["yes"]  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(
                model="fake-model", prompt="a", extra_body={"guided_choice": []}
            )
        assert caught.value.param == "guided_choice"
