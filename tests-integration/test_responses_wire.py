"""Responses and messages of the demo model, through the real clients and over a real socket."""

from __future__ import annotations

import openai
import pytest
from servers import serving

from headrace_testing.waiting import wait_until

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
RESULT = '{"temperature": 21, "sky": "sunny"}'
SAID = "The temperature is 21 and the sky is sunny."


@pytest.fixture(scope="module", params=["one-process", "engine-process"])
def server(request):
    words = ["--engine-process"] if request.param == "engine-process" else []
    with serving(
        "--enable-responses-store", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3", *words,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        yield client


def ask(client, given, **settings):
    return client.responses.create(model="headrace-demo", input=given, temperature=0, **settings)


def test_whole_and_streamed_are_equal(client):
    whole = ask(client, "What is 5 + 6?")
    assert "11" in whole.output_text
    with client.responses.stream(
        model="headrace-demo", input="What is 5 + 6?", temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens
    deltas = (e.delta for e in events if e.type == "response.output_text.delta")
    assert "".join(deltas) == whole.output_text


def test_reasoning_is_an_item(client):
    answer = ask(
        client, "What is 12 + 30?", extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content[0].text
    assert "42" in message.content[0].text
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


def test_a_function_and_the_chained_answer(client):
    asked = ask(client, "What is the weather in Oslo?", tools=[WEATHER])
    [call] = [item for item in asked.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Oslo"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    chained = ask(client, [result], previous_response_id=asked.id, tools=[WEATHER])
    assert chained.output_text.strip() == SAID
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    sent = ask(client, [question, *asked.output, result], tools=[WEATHER])
    assert sent.output_text == chained.output_text


def test_background_polling_and_cancelling(client):
    begun = ask(client, "Hello!", background=True)

    def has_ended():
        return client.responses.retrieve(begun.id).status not in ("queued", "in_progress")

    wait_until(has_ended)
    now = client.responses.retrieve(begun.id)
    assert (now.status, bool(now.output_text)) == ("completed", True)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(begun.id)
    again = list(client.responses.retrieve(begun.id, stream=True, starting_after=1))
    assert again[-1].type == "response.completed"


def test_anthropics_client(server):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "description": "Get the weather in a city.",
            "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}  # fmt: skip
    common = {"model": "headrace-demo", "max_tokens": 64, "tools": [tool]}
    question = {"role": "user", "content": "What is the weather in Oslo?"}
    asked = client.messages.create(messages=[question], **common)
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert (call.name, call.input, asked.stop_reason) == (
        "get_weather", {"city": "Oslo"}, "tool_use",
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    talk = [question, {"role": "assistant", "content": asked.content},
            {"role": "user", "content": [result]}]  # fmt: skip
    whole = client.messages.create(messages=talk, **common)
    assert whole.content[0].text.strip() == SAID
    with client.messages.stream(messages=talk, **common) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model="headrace-demo", messages=[question], tools=[tool])
    usage = asked.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="x", max_tokens=1, messages=[question])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="headrace-demo", max_tokens=0, messages=[question])
