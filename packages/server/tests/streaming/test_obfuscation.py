"""Padded events: the same data, in sizes that do not tell of their text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_server.streaming.event_stream import event, named_event
from headrace_server.streaming.obfuscation import STEP, pad


def data_of(events: bytes) -> list[Any]:
    lines = events.decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_padding_changes_nothing_but_the_size(texts: list[str]) -> None:
    padded = pad(b"".join(event({"delta": text}) for text in texts))
    assert [data["delta"] for data in data_of(padded)] == texts
    for one in padded.removesuffix(b"\n\n").split(b"\n\n"):
        assert (len(one) + 2) % STEP == 0


def test_tokens_come_in_events_of_one_size() -> None:
    tokens = ["a", " the", "\n\n", '"', " extraordinarily", "é"]
    head = {"id": "chatcmpl-0123", "object": "chat.completion.chunk"}
    assert len({len(pad(event({**head, "delta": {"content": t}}))) for t in tokens}) == 1


def test_the_padding_differs_each_time() -> None:
    assert pad(event({"a": "b"})) != pad(event({"a": "b"}))


@pytest.mark.parametrize("name", ["response.completed", "response.output_item.added"])
def test_named_events_without_new_text_stay(name: str) -> None:
    assert pad(named_event(name, {"a": 1})) == named_event(name, {"a": 1})


def test_deltas_are_padded() -> None:
    [data] = data_of(pad(named_event("response.output_text.delta", {"delta": "x"})))
    assert data["obfuscation"]


@pytest.mark.parametrize(
    "other", [b"", b"\n\n", b": keep-alive\n\n", b"data: [DONE]\n\n", b"data: {}\n\n"]
)
def test_what_is_no_object_stays(other: bytes) -> None:
    assert pad(other) == other
