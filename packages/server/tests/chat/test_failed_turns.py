"""Answers that end part-way: every item that a stream opened is closed, and none as complete."""

from __future__ import annotations

import json
from typing import Any

import pydantic_core
import pytest

from headrace_testing.fakes.engine import FakeEngine

URL = "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HALF = CALL[: CALL.index("1")]
OPEN = CALL[: CALL.index("}</") - 1]
"""The arguments' last bracket is missing."""
WHOLE = CALL.removesuffix("</tool_call>")
"""The arguments are complete, the call is not."""
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}
TEXTS = {
    "text": ("Hello.", ["message"]),
    "reasoning": ("<think>Well, ", ["reasoning"]),
    "half a call": (HALF, ["function_call"]),
    "an open call": (OPEN, ["function_call"]),
    "a call without its end": (WHOLE, ["function_call"]),
    "text behind a call": (CALL + "And so", ["function_call", "message"]),
    "half a second call": ("<think>I</think>" + CALL + HALF,
                           ["reasoning", "function_call", "function_call"]),
}  # fmt: skip


class FailingEngine(FakeEngine):
    """Every answer fails once its text is said: as an output, or as an exception.

    Args:
        way: ``raise``, or the finish reason of the last output.
    """

    def __init__(self, text: str, way: str, **settings: Any) -> None:
        super().__init__(text, **settings)
        self.way = way

    async def _play(self, *args: Any) -> Any:
        async for output in super()._play(*args):
            if output.finished and self.way == "raise":
                output.outputs[0].finish_reason = None
                output.finished = False
                yield output
                self.kill()
                self._raise_if_dead()
            if output.finished:
                output.outputs[0].finish_reason = self.way
                if self.way == "error":
                    output.outputs[0].stop_reason = "no token is possible"
            yield output


def told(text: str) -> list[dict[str, Any]]:
    """The events of a stream, whose numbers rise from 0 without holes."""
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def check_items(events: list[dict[str, Any]], kinds: list[str], last: str) -> None:
    """Each item is opened and closed once, all but the last as completed, and stays as it was told."""
    added = [e["item"] for e in events if e["type"] == "response.output_item.added"]
    done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
    assert [item["type"] for item in added] == kinds
    assert [item["id"] for item in done] == [item["id"] for item in added]
    assert [item["status"] for item in done] == ["completed"] * (len(kinds) - 1) + [last]
    assert events[-1]["response"]["output"] == done
    for item in done:
        ends = [e["type"] for e in events if e.get("item_id") == item["id"]]
        if item["type"] == "function_call":
            assert ends.count("response.function_call_arguments.done") == 1
        else:
            opened = sum(kind.endswith("_part.added") for kind in ends)
            assert opened == sum(kind.endswith("_part.done") for kind in ends) == 1


@pytest.mark.parametrize("way", ["raise", "error", "abort"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("size", [1, 5])
async def test_a_failed_stream_closes_its_items(
    connect: Any, name: str, way: str, size: int
) -> None:
    text, kinds = TEXTS[name]
    engine = FailingEngine(text, way, tokens_per_output=size)
    client = connect(engine, **PARSERS, enable_responses_store=True)
    answer = await client.post(URL, json={"input": "Hi", "stream": True, "tools": [ADD]})
    events = told(answer.text)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["message"]
    check_items(events, kinds, "incomplete")
    # Read later, it is the same.
    path = f"{URL}/{events[0]['response']['id']}"
    kept = await client.get(path)
    assert kept.json() == last["response"]
    assert told((await client.get(path + "?stream=true")).text) == events


@pytest.mark.parametrize("way", ["raise", "error"])
@pytest.mark.parametrize("name", ["half a call", "a call without its end", "text"])
async def test_a_failed_background_response_closes_its_items(
    connect: Any, name: str, way: str
) -> None:
    text, kinds = TEXTS[name]
    client = connect(FailingEngine(text, way), **PARSERS, enable_responses_store=True)
    body = {"input": "Hi", "stream": True, "background": True, "tools": [ADD]}
    events = told((await client.post(URL, json=body)).text)
    assert events[-1]["type"] == "response.failed"
    check_items(events, kinds, "incomplete")
    kept = await client.get(f"{URL}/{events[0]['response']['id']}")
    assert kept.json() == events[-1]["response"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("text", "incomplete"),
        ("half a call", "incomplete"),
        ("a call without its end", "completed"),
    ],
)
async def test_a_cut_stream_closes_its_items(connect: Any, name: str, status: str) -> None:
    text, kinds = TEXTS[name]
    client = connect(FakeEngine(text + "..."), **PARSERS)
    limit = {"max_output_tokens": len(text)}
    answer = await client.post(URL, json={"input": "Hi", "stream": True, "tools": [ADD], **limit})
    events = told(answer.text)
    assert events[-1]["type"] == "response.incomplete"
    check_items(events, kinds, status)


@pytest.mark.parametrize("way", ["raise", "error", "abort"])
@pytest.mark.parametrize("name", TEXTS)
async def test_a_failed_message_ends_in_its_error(connect: Any, name: str, way: str) -> None:
    """The block that was being written is not stopped: a stop says that the block is whole."""
    text, kinds = TEXTS[name]
    client = connect(FailingEngine(text, way), **PARSERS)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"model": "fake-model", "max_tokens": 500, "messages": HI, "stream": True}
    more = {"tools": tools, "thinking": {"type": "adaptive"}}
    lines = (await client.post("/v1/messages", json=body | more)).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]
    said = [event["type"] for event in events]
    assert said[-1] == "error"
    assert said.count("error") == 1
    assert "message_delta" not in said
    assert "message_stop" not in said
    assert said.count("content_block_start") == len(kinds)
    assert said.count("content_block_stop") == len(kinds) - 1


@pytest.mark.parametrize("limit", range(1, len(CALL) + 3))
async def test_a_cut_call_is_read_alike_whole_and_streamed(connect: Any, limit: int) -> None:
    """What a partial parser, as Anthropic's clients have one, reads in the deltas is the whole input."""
    client = connect(FakeEngine(CALL), **PARSERS)
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    body = {"model": "fake-model", "max_tokens": limit, "messages": HI, "tools": tools}
    whole = (await client.post("/v1/messages", json=body)).json()
    lines = (await client.post("/v1/messages", json={**body, "stream": True})).text.split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data")]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(d["partial_json"] for d in deltas if d["type"] == "input_json_delta")
    inputs = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert inputs in ([], [pydantic_core.from_json(text or "{}", allow_partial=True)])
    assert bool(inputs) == any(e.get("content_block", {}).get("type") == "tool_use" for e in events)
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert whole["stop_reason"] == ("max_tokens" if limit <= len(CALL) else "tool_use")
