"""Streams say what whole answers say, however the engine cuts its output (REL-16)."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_server import ServerSettings, create_app
from headrace_testing.fakes.engine import FakeEngine

CHAT = "/v1/chat/completions"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("add", "look_up")
]
NAMED = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "größe": "<x>"}}</tool_call>'
FORCED = '[{"name": "add", "parameters": {"a": [1, {"b": "]}"}]}}, {"name": "look_up", "parameters": {}}]'
PARTS = [
    "so", " ", "\n", "größe 東京", "<think>", "</think>", "<tool_call>", "</tool_call>", CALL, "{", "}",
    "<", "👩‍👩‍👧", '"name"', "why",
]  # fmt: skip

pytestmark = pytest.mark.req("REL-16")


def cuts(seed: int) -> Any:
    """A function that gives random sizes of outputs, the same for one seed."""
    chance = random.Random(seed)
    return lambda: chance.choice([1, 1, 2, 3, 7, 40])


def parse_events(text: str) -> Iterator[Any]:
    blocks = [b for b in text.split("\n\n") if b and not b.startswith(":")]
    assert blocks[-1] == "data: [DONE]"
    assert blocks.count("data: [DONE]") == 1
    for block in blocks[:-1]:
        yield json.loads(block.removeprefix("data: "))


def gather_chat(chunks: list[Any]) -> tuple[dict[int, dict[str, Any]], Any]:
    """(choice by index, usage) of a stream, in the form of a whole answer's."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage", usage)
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"],
                {"content": "", "reasoning": "", "calls": [], "logprobs": [], "reason": None,
                 "ids": []},
            )  # fmt: skip
            delta = part["delta"]
            choice["content"] += delta.get("content", "")
            choice["reasoning"] += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["reason"] = part["finish_reason"] or choice["reason"]
            choice["ids"] += part.get("token_ids", [])
            for piece in delta.get("tool_calls", []):
                if piece["index"] == len(choice["calls"]):
                    choice["calls"].append([piece["function"]["name"], ""])
                choice["calls"][piece["index"]][1] += piece["function"]["arguments"]
    return choices, usage


def whole_chat(answer: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    choices = {}
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]]
                 for c in message.get("tool_calls") or []]  # fmt: skip
        choices[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message["reasoning"] or "",
            "calls": calls,
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "reason": choice["finish_reason"],
            "ids": choice["token_ids"] or [],
        }
    return choices, answer["usage"]


class Server:
    """An application over an engine whose script may change; making one costs more than asking."""

    def __init__(self, **settings: Any) -> None:
        self.engine = FakeEngine("")
        app = create_app(self.engine, ServerSettings(**settings))
        self._transport = httpx2.ASGITransport(app=app)

    async def both(
        self, text: Any, seed: int, pushes: bool, url: str, body: Any
    ) -> tuple[Any, list[Any]]:
        """The whole answer and the events of the stream, if the engine says ``text``."""
        self.engine.reply, self.engine.pushes = text, pushes
        self.engine.tokens_per_output = cuts(seed)
        async with httpx2.AsyncClient(transport=self._transport, base_url="http://x") as client:
            whole = await client.post(url, json=body)
            assert whole.status_code == 200, whole.text
            options = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await client.post(url, json={**body, **options})
            assert stream.status_code == 200, stream.text
            return whole.json(), list(parse_events(stream.text))


@functools.cache
def server(parsed: bool) -> Server:
    """One with a reasoning parser, one without."""
    on = {"reasoning_parser": "qwen3"} if parsed else {}
    return Server(enable_auto_tool_choice=True, tool_call_parser="hermes", **on)


TEXTS = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=8).map("".join),
    st.sampled_from([FORCED, FORCED[:-9], '{"a": 1}', f"<think>why</think>so{CALL}{CALL}"]),
)
BODIES = st.fixed_dictionaries(
    {"n": st.integers(1, 2), "temperature": st.just(0.5)},
    optional={
        "logprobs": st.just(True),
        "return_token_ids": st.just(True),
        "stop": st.sampled_from(["so", "</", "東"]),
        "max_tokens": st.integers(1, 60),
        "include_reasoning": st.just(False),
        "tool_choice": st.sampled_from(["none", "auto", "required", NAMED]),
        "parallel_tool_calls": st.just(False),
    },
)


@settings(max_examples=120, deadline=None)
@given(TEXTS, BODIES, st.integers(0, 10**6), st.booleans(), st.booleans())
async def test_chats(text: str, body: Any, seed: int, parsed: bool, pushes: bool) -> None:
    asked = {**body, "tools": TOOLS, "messages": [{"role": "user", "content": "Hi"}]}
    whole, chunks = await server(parsed).both(
        lambda prompt, index: text + str(index), seed, pushes, CHAT, asked
    )
    found, usage = gather_chat(chunks)
    assert (found, usage) == whole_chat(whole)


COMPLETION_BODIES = st.fixed_dictionaries(
    {"n": st.integers(1, 2), "temperature": st.just(0.5)},
    optional={
        "prompt": st.sampled_from(["ü", ["a", [98, 99]], [[97], "b", "c"]]),
        "logprobs": st.integers(0, 2),
        "echo": st.just(True),
        "max_tokens": st.integers(1, 30),
        "stop": st.sampled_from(["so", "</", "東"]),
        "return_token_ids": st.just(True),
        "return_tokens_as_token_ids": st.just(True),
    },
)


@settings(max_examples=60, deadline=None)
@given(TEXTS, COMPLETION_BODIES, st.integers(0, 10**6), st.booleans())
async def test_completions(text: str, body: Any, seed: int, pushes: bool) -> None:
    whole, chunks = await server(False).both(
        lambda prompt, index: text + str(index), seed, pushes, "/v1/completions",
        {"prompt": "p", **body},
    )  # fmt: skip
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        assert [t for c in mine for t in c.get("token_ids", [])] == (choice["token_ids"] or [])
        for key, values in (choice["logprobs"] or {}).items():
            assert [v for c in mine for v in (c["logprobs"] or {}).get(key, [])] == values


@settings(max_examples=15, deadline=None)
@given(TEXTS, st.integers(1, 2), st.integers(0, 10**6))
async def test_tokens(text: str, n: int, seed: int) -> None:
    sampling = {"n": n, "temperature": 0.5, "logprobs": 1, "max_tokens": None}
    body = {"token_ids": [72], "sampling_params": sampling}
    whole, chunks = await server(False).both(text + ".", seed, True, "/inference/v1/generate", body)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert [t for c in mine for t in c["token_ids"]] == choice["token_ids"]
        entries = [e for c in mine for e in c["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
