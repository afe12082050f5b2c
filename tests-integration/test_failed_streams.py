"""Streams that fail or are cut part-way in a call, through the real clients and over a real socket."""

from __future__ import annotations

import anthropic
import openai
import pydantic_core
import pytest
from servers import serving

from headrace_core.reliability import failpoints

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ASK = "What is the weather in Oslo?"
FAULTS = {
    f"{point}={kind}": (point, kind, after)
    for after, (point, kind) in enumerate(
        [("engine.step.forward", "memory"), ("engine.step.sample", "nan"), ("engine.update", "raise"),
         ("output.update", "raise")], 14,
    )
}  # fmt: skip
"""Faults that end one request each, once so many of its tokens are out: within the arguments."""


@pytest.fixture(scope="module")
def server():
    plan = ";".join(
        f"{point}={kind}(match=at-{point}-,after={after},times=1000000)"
        for point, kind, after in FAULTS.values()
    )
    with serving(
        "--enable-responses-store", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        environment={failpoints.VARIABLE: plan},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client:
        yield client


def streamed(client, name, **settings):
    """The events of a response that asks for a call; the request's id is its name."""
    return list(
        client.responses.create(
            model="headrace-demo", input=ASK, tools=[TOOL], temperature=0, stream=True,
            extra_headers={"X-Request-Id": name}, **settings,
        )
    )  # fmt: skip


def check_items(events):
    """Every item is closed once, with the status that the last event says. Returns that response."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [e.item.id for e in events if e.type == "response.output_item.added"]
    done = [e.item for e in events if e.type == "response.output_item.done"]
    response = events[-1].response
    assert [item.id for item in done] == added
    assert response.output == done
    return response


@pytest.mark.req("REL-01")
@pytest.mark.parametrize("name", FAULTS)
def test_a_call_that_was_being_written_is_not_completed(client, name):
    point, _, _ = FAULTS[name]
    events = streamed(client, f"at-{point}-")
    assert events[-1].type == "response.failed"
    response = check_items(events)
    assert response.status == "failed"
    assert response.error.message
    [call] = response.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert call.arguments.startswith("{")
    kept = client.responses.retrieve(response.id)
    assert kept == response


def test_a_call_that_is_cut_anywhere(server, client):
    """Anthropic's client makes the whole answer's input of a stream: the members that are
    complete. What a response says of the call is as far as it came, and whether that is all."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as other:
        seen = set()
        for limit in range(6, 26, 2):
            events = streamed(client, f"cut-{limit}", max_output_tokens=limit)
            response = check_items(events)
            calls = [item for item in response.output if item.type == "function_call"]
            tool = {"name": "get_weather", "input_schema": TOOL["parameters"]}
            asked = {
                "model": "headrace-demo", "max_tokens": limit,
                "tools": [{**tool, "description": TOOL["description"]}],
                "messages": [{"role": "user", "content": ASK}], "extra_body": {"temperature": 0},
            }  # fmt: skip
            whole = other.messages.create(**asked)
            with other.messages.stream(**asked) as stream:
                pieces = [
                    event.delta.partial_json
                    for event in stream
                    if event.type == "content_block_delta"
                    and event.delta.type == "input_json_delta"
                ]
                final = stream.get_final_message()
            assert final.stop_reason == whole.stop_reason
            inputs = [block.input for block in whole.content if block.type == "tool_use"]
            assert inputs == [block.input for block in final.content if block.type == "tool_use"]
            for call, input_ in zip(calls, inputs, strict=True):
                assert call.arguments == "".join(pieces)
                read = pydantic_core.from_json(call.arguments or "{}", allow_partial=True)
                assert read == input_
                assert (call.status == "completed") == call.arguments.endswith("}")
                seen.add(call.status)
        assert seen == {"incomplete", "completed"}
