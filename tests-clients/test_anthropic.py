"""The ``anthropic`` package."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import pytest
from asked import ASK_SUM, ASK_WEATHER, WEATHER

TOOL: Any = {"name": "get_weather", "description": "Get the weather.", "input_schema": WEATHER}


@pytest.fixture(scope="module")
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_messages_whole_and_streamed(client: anthropic.Anthropic, model: str) -> None:
    request: Any = {"model": model, "max_tokens": 50, "messages": user(ASK_SUM),
                    "extra_body": {"temperature": 0}}  # fmt: skip
    whole = client.messages.create(**request, system="You are helpful.")
    assert whole.stop_reason == "end_turn"
    assert whole.content[0].type == "text"
    with client.messages.stream(**request, system="You are helpful.") as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == whole.content[0].text
    counted = client.messages.count_tokens(
        model=model, messages=request["messages"], system="You are helpful."
    )
    for usage in (final.usage, whole.usage):  # what was found in the cache is counted apart
        prompt = usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert (prompt, usage.output_tokens) == (counted.input_tokens, whole.usage.output_tokens)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_forced_tools(client: anthropic.Anthropic, model: str, choice: Any) -> None:
    request: Any = {
        "model": model, "max_tokens": 200, "messages": user(ASK_WEATHER), "tools": [TOOL],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }  # fmt: skip
    whole = client.messages.create(**request)
    [block] = [block for block in whole.content if block.type == "tool_use"]
    jsonschema.validate(block.input, WEATHER)
    assert whole.stop_reason == "tool_use"
    with client.messages.stream(**request) as events:
        final = events.get_final_message()
    jsonschema.validate(final.content[-1].input, WEATHER)


def test_tool_round_trip(client: anthropic.Anthropic, model: str) -> None:
    messages = user(ASK_WEATHER)
    request: Any = {"model": model, "max_tokens": 100, "tools": [TOOL],
                    "extra_body": {"temperature": 0}}  # fmt: skip
    asked = client.messages.create(messages=messages, **request)
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert call.input == {"city": "Oslo"}
    messages += [
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call.id, "content": "rain, 8 degrees"}]},
    ]  # fmt: skip
    assert client.messages.create(messages=messages, **request).content


def test_counting_and_refusals(client: anthropic.Anthropic, model: str) -> None:
    counted = client.messages.count_tokens(model=model, messages=user(ASK_SUM))
    whole = client.messages.create(model=model, max_tokens=4, messages=user(ASK_SUM))
    found = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + found
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nothing", max_tokens=4, messages=user("x"))
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=model, max_tokens=0, messages=user("x"))
