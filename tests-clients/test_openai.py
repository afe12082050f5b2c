"""The ``openai`` package: chat, streams, tools, JSON schemas, responses, completions."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from asked import ASK_SUM, ASK_WEATHER, PERSON, WEATHER
from pydantic import BaseModel

TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather.", "parameters": WEATHER},
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "cet"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI, model: str) -> None:
    assert model in [card.id for card in client.models.list()]
    assert client.models.retrieve(model).id == model


def test_chat_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    request: Any = {"model": model, "messages": user(ASK_SUM), "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    [choice] = whole.choices
    assert "11" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert whole.usage is not None
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    assert chunks[-1].usage == whole.usage


def test_several_choices_and_stops(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=user("Hello!"),
        n=3,
        temperature=1,
        max_completion_tokens=8,
        stop=["!"],
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all("!" not in (choice.message.content or "") for choice in answer.choices)


def test_free_tool_calls_and_their_results(client: openai.OpenAI, model: str) -> None:
    messages = user(ASK_WEATHER)
    request: Any = {"model": model, "tools": [TOOL], "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **request)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls or []
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages.append(choice.message.model_dump(exclude_none=True))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "rain, 8 degrees"})
    told = client.chat.completions.create(messages=messages, **request)
    assert told.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_forced_calls(client: openai.OpenAI, model: str, choice: Any, stream: bool) -> None:
    request: Any = {
        "model": model, "messages": user(ASK_WEATHER), "tools": [TOOL, TIME], "seed": 3,
        "tool_choice": choice, "max_completion_tokens": 400, "parallel_tool_calls": False,
    }  # fmt: skip
    if stream:
        names, arguments, reason = "", "", None
        for chunk in client.chat.completions.create(**request, stream=True):
            for part in chunk.choices:
                reason = part.finish_reason or reason
                for piece in part.delta.tool_calls or []:
                    names += piece.function.name or ""
                    arguments += piece.function.arguments or ""
    else:
        [answer] = client.chat.completions.create(**request).choices
        [call] = answer.message.tool_calls or []
        names, arguments, reason = (
            call.function.name, call.function.arguments, answer.finish_reason,
        )  # fmt: skip
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in (TOOL, TIME)}
    assert names in schemas
    jsonschema.validate(json.loads(arguments), schemas[names])
    assert reason == ("tool_calls" if choice == "required" else "stop")


def test_parallel_calls_come_apart(client: openai.OpenAI, model: str) -> None:
    """Many seeds: sooner or later the list holds several calls."""
    counts = set()
    for seed in range(12):
        answer = client.chat.completions.create(
            model=model, messages=user(ASK_WEATHER), tools=[TOOL, TIME], tool_choice="required",
            seed=seed, temperature=1, max_completion_tokens=300,
        )  # fmt: skip
        calls = answer.choices[0].message.tool_calls or []
        if answer.choices[0].finish_reason == "length":
            continue
        assert calls
        assert len({call.id for call in calls}) == len(calls)
        counts.add(len(calls))
    assert counts


class Sum(BaseModel):
    operation: Literal["add", "subtract"]
    exact: bool


def test_json_schemas(client: openai.OpenAI, model: str) -> None:
    for seed in range(5):
        answer = client.chat.completions.create(
            model=model, messages=user("Who are you?"), seed=seed, max_completion_tokens=400,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
        )  # fmt: skip
        if answer.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(answer.choices[0].message.content or ""), PERSON)
    parsed = client.chat.completions.parse(
        model=model, messages=user(ASK_SUM), response_format=Sum, max_completion_tokens=400
    )
    assert isinstance(parsed.choices[0].message.parsed, Sum)


def test_refusals_are_the_clients_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nothing", messages=user("x"))
    assert unknown.value.status_code == 404
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=model, messages=user("x"), temperature=-1)
    assert isinstance(wrong.value.body, dict)
    assert wrong.value.body["param"] == "temperature"
    with pytest.raises(openai.BadRequestError, match="pattern"):
        client.chat.completions.create(
            model=model, messages=user("x"),
            response_format={"type": "json_schema", "json_schema": {
                "name": "p", "schema": {"type": "string", "pattern": "("}}},
        )  # fmt: skip


def test_completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["Hello", "The"], n=2, max_tokens=4, temperature=1, seed=5, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    pieces = client.completions.create(
        model=model, prompt="Hello", max_tokens=6, temperature=0, stream=True
    )
    whole = client.completions.create(model=model, prompt="Hello", max_tokens=6, temperature=0)
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text


def test_responses_chain_and_stream(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input=ASK_SUM, temperature=0)
    assert first.status == "completed"
    assert "11" in first.output_text
    again = client.responses.create(
        model=model, input="Hello!", previous_response_id=first.id, temperature=0
    )
    assert again.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    numbers = []
    with client.responses.stream(model=model, input=ASK_SUM, temperature=0) as events:
        numbers += [event.sequence_number for event in events]
        final = events.get_final_response()
    assert numbers == list(range(len(numbers)))
    assert final.output_text == first.output_text


def test_responses_tools(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    asked = client.responses.create(
        model=model, input=ASK_WEATHER, tools=[tool], tool_choice="required", temperature=0,
        parallel_tool_calls=False, max_output_tokens=400,
    )  # fmt: skip
    calls: list[Any] = [item for item in asked.output if item.type == "function_call"]
    assert calls
    jsonschema.validate(json.loads(calls[0].arguments), WEATHER)
    told = client.responses.create(
        model=model, previous_response_id=asked.id, tools=[tool], temperature=0,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
               for call in calls],
    )  # fmt: skip
    assert told.status == "completed"


async def _many(url: str, model: str) -> list[str]:
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    async def one(text: str) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=user(text), temperature=0, stream=True, max_completion_tokens=24
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    async with client:
        return await asyncio.gather(*(one(f"What is {n} + 2?") for n in range(16)))


def test_many_streams_at_once(url: str, model: str) -> None:
    import asyncio

    together = asyncio.run(_many(url, model))
    assert together == asyncio.run(_many(url, model))
