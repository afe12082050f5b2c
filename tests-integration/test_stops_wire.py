"""What ends an output, on every wire: end tokens, stop strings, and calls in front of them."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from servers import PATIENCE, RunningServer

from headrace import LLM, SamplingParams

SUM, SAID = "What is 5 + 6?", "5 + 6 = 11."
CITY = "What is the weather in Oslo?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city."}
CHAT_TOOL = {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}}
RESPONSE_TOOL = {"type": "function", **FUNCTION, "parameters": SCHEMA}
MESSAGE_TOOL = {**FUNCTION, "input_schema": SCHEMA}
END = "<|im_end|>"
PIECES = ["|", "<", END, "im_end"]
"""Texts of the end token, and of nothing else that the model writes here."""


def post(server: RunningServer, path: str, **body: Any) -> Any:
    """The answer, or a stream's events."""
    data = json.dumps({"temperature": 0, **body}).encode()
    request = urllib.request.Request(server.api + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        text = response.read().decode()
    if not body.get("stream"):
        return json.loads(text)
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(server: RunningServer, asked: str, *, stream: bool, **more: Any) -> dict[str, Any]:
    """What an answer comes to: content, names and arguments of calls, reasons, entries."""
    found = post(
        server, "/chat/completions", messages=[{"role": "user", "content": asked}], logprobs=True,
        stream=stream, **more,
    )  # fmt: skip
    answer: dict[str, Any] = {"content": "", "calls": [], "entries": [], "stop": None}
    for choice in [c for event in (found if stream else [found]) for c in event["choices"]]:
        said = choice["delta" if stream else "message"]
        answer["content"] += said.get("content") or ""
        for call in said.get("tool_calls") or []:
            if call["function"].get("name"):
                answer["calls"].append([call["function"]["name"], ""])
            answer["calls"][-1][1] += call["function"].get("arguments") or ""
        answer["entries"] += (choice.get("logprobs") or {}).get("content") or []
        answer["finish"] = choice["finish_reason"]
        answer["stop"] = choice.get("stop_reason")
    return answer


def bytes_of(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_with_tools(server: RunningServer, stream: bool) -> None:
    """Tools keep special tokens in the text, for their parser; the end token is no part of it."""
    for stop in [*PIECES, PIECES]:
        answer = chat(server, SUM, stream=stream, tools=[CHAT_TOOL], stop=stop)
        assert (answer["content"], answer["finish"], answer["stop"]) == (SAID, "stop", None)
        assert bytes_of(answer["entries"]).decode() == SAID
        assert answer["entries"][-1] == {**answer["entries"][-1], "token": END, "bytes": []}
    plain = chat(server, SUM, stream=stream, tools=[CHAT_TOOL])
    assert bytes_of(plain["entries"]).decode() == plain["content"] == SAID
    answer = chat(server, SUM, stream=stream, tools=[CHAT_TOOL], stop="+ 6")
    assert (answer["content"], answer["finish"], answer["stop"]) == ("5 ", "stop", "+ 6")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", ["auto", "required"])
def test_calls_stay_complete(server: RunningServer, stream: bool, asked: str) -> None:
    more = {"stream": stream, "tools": [CHAT_TOOL], "tool_choice": asked}
    plain = chat(server, CITY, **more)
    assert plain["calls"] == [["get_weather", plain["calls"][0][1]]]
    assert json.loads(plain["calls"][0][1]) == {"city": "Oslo"}
    for stop in ["|", END]:
        answer = chat(server, CITY, **more, stop=stop)
        assert {**answer, "entries": 0} == {**plain, "entries": 0}
    assert plain["finish"] == "tool_calls"
    assert not bytes_of(plain["entries"]).decode().endswith(END)


@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_for_special_tokens_gets_them(server: RunningServer, stream: bool) -> None:
    """And a stop string is not found in the end token even then."""
    for more in ({}, {"tools": [CHAT_TOOL]}):
        answer = chat(server, SUM, stream=stream, stop="|", skip_special_tokens=False, **more)
        assert (answer["content"], answer["stop"]) == (SAID + END, None)
        assert bytes_of(answer["entries"]).decode() == SAID + END


@pytest.mark.parametrize("stream", [False, True])
def test_completions(server: RunningServer, stream: bool) -> None:
    prompt = f"<|im_start|>user\n{SUM}{END}\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for skip, text in ((True, SAID), (False, SAID + END)):
        for stop in [None, *PIECES]:
            found = post(
                server, "/completions", prompt=prompt, max_tokens=40, stop=stop, stream=stream,
                skip_special_tokens=skip, logprobs=0,
            )  # fmt: skip
            choices = [c for event in (found if stream else [found]) for c in event["choices"]]
            assert "".join(c["text"] for c in choices).strip() == text
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", None)


@pytest.mark.parametrize("stream", [False, True])
def test_responses(server: RunningServer, stream: bool) -> None:
    for asked, kind in ((SUM, "message"), (CITY, "function_call")):
        found = post(
            server, "/responses", input=asked, tools=[RESPONSE_TOOL], stop=["|"], stream=stream
        )
        answer = found[-1]["response"] if stream else found
        assert answer["status"] == "completed"
        [item] = answer["output"]
        assert (item["type"], item["status"]) == (kind, "completed")
        if kind == "message":
            assert item["content"][0]["text"] == SAID
        else:
            assert json.loads(item["arguments"]) == {"city": "Oslo"}


def test_a_response_streams_every_entry(server: RunningServer) -> None:
    """Tokens without text, as the end token, have entries in deltas, too."""
    body = {"include": ["message.output_text.logprobs"], "input": SUM}
    whole = post(server, "/responses", **body)["output"][0]["content"][0]
    events = post(server, "/responses", **body, stream=True)
    deltas = [e for e in events if e["type"] == "response.output_text.delta"]
    told = [(entry["token"], entry["bytes"]) for delta in deltas for entry in delta["logprobs"]]
    assert told == [(entry["token"], entry["bytes"]) for entry in whole["logprobs"]]
    assert told[-1] == (END, [])
    assert "".join(delta["delta"] for delta in deltas) == whole["text"] == SAID
    [done] = [e for e in events if e["type"] == "response.output_text.done"]
    assert (done["text"], len(done["logprobs"])) == (SAID, len(told))


def message(server: RunningServer, asked: str, *, stream: bool, **more: Any) -> tuple[Any, ...]:
    """Types of blocks, stop reason and stop sequence."""
    found = post(
        server, "/messages", messages=[{"role": "user", "content": asked}], max_tokens=64,
        model="headrace-demo", tools=[MESSAGE_TOOL], stream=stream, **more,
    )  # fmt: skip
    if not stream:
        return [b["type"] for b in found["content"]], found["stop_reason"], found["stop_sequence"]
    kinds = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    [ending] = [e["delta"] for e in found if e["type"] == "message_delta"]
    return kinds, ending["stop_reason"], ending["stop_sequence"]


@pytest.mark.parametrize("stream", [False, True])
def test_messages(server: RunningServer, stream: bool) -> None:
    """A complete call wins over the stop sequence behind it, as in chats; one that is cut does not."""
    for sequence in ("|", END):
        more: dict[str, Any] = {"stream": stream, "stop_sequences": [sequence]}
        assert message(server, SUM, **more) == (["text"], "end_turn", None)
        assert message(server, CITY, **more) == (["tool_use"], "tool_use", None)
    for sequence, reason in (("</tool_call>", "tool_use"), ("Oslo", "stop_sequence")):
        more = {"stream": stream, "stop_sequences": [sequence]}
        assert message(server, CITY, **more) == (["tool_use"], reason, sequence)
        wanted = "tool_calls" if reason == "tool_use" else "stop"
        answer = chat(server, CITY, stream=stream, tools=[CHAT_TOOL], stop=sequence)
        assert (answer["finish"], answer["stop"]) == (wanted, sequence)
    more = {"stream": stream, "stop_sequences": ["+ 6"]}
    assert message(server, SUM, **more) == (["text"], "stop_sequence", "+ 6")


def test_offline() -> None:
    asked = [{"role": "user", "content": SUM}]
    with LLM(max_model_len=512, max_num_seqs=4, num_threads=1) as llm:
        for skip, text in ((True, SAID), (False, SAID + END)):
            for stop in [None, *PIECES]:
                params = SamplingParams(
                    temperature=0, max_tokens=40, stop=stop, skip_special_tokens=skip, logprobs=0
                )
                [output] = llm.chat(asked, params, tools=[CHAT_TOOL], use_tqdm=False)
                [answer] = output.outputs
                assert (answer.text.strip(), answer.stop_reason) == (text, None)
