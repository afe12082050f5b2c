"""Reading streams back, in any pieces."""

from __future__ import annotations

import itertools
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_server.observability.sse_reader import EventDecoder, text_of

EVENTS = [
    {"choices": [{"index": 0, "text": "Grüße, "}]},
    {"choices": [{"index": 1, "text": "other"}]},
    {"choices": [{"index": 0, "delta": {"content": "Welt 🌍"}}]},
    {"choices": [], "usage": {"total_tokens": 3}},
    {"error": {"message": "m"}},
]
STREAM = (
    b": keep-alive\n\n\n\n"
    + b"".join(b"data: " + json.dumps(e, ensure_ascii=False).encode() + b"\n\n" for e in EVENTS)
    + b"data: [DONE]\n\n"
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_split(cuts: list[int]) -> None:
    decoder, events = EventDecoder(), []
    edges = [0, *sorted(cuts), len(STREAM)]
    for begin, end in itertools.pairwise(edges):
        events += decoder.feed(STREAM[begin:end])
    assert events == EVENTS
    assert decoder.text == "Grüße, Welt 🌍"


def test_broken_events_are_left_out() -> None:
    decoder = EventDecoder(limit=3)
    assert decoder.feed(b"data: {\n\ndata: 1\n\nevent: x\n\ndata: \xff\n\n") == [1]
    decoder.feed(b'data: {"choices": [{"text": "abcdef"}]}\n\n')
    assert decoder.text == "abc"
    assert [text_of(e) for e in (None, [], {"choices": 3}, {"choices": [3]})] == [""] * 4
