"""Bodies at the edge of JSON: byte order marks, depth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_server.http.json_counts import nesting
from headrace_server.http.routing import MAX_DEPTH
from headrace_testing.fakes.engine import FakeEngine

URL = "/v1/completions"
HEADERS = {"Content-Type": "application/json"}
BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (URL, {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages",
         {"model": "fake-model", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/invocations", {"prompt": "Hi"}),
        ("/tokenize", {"prompt": "Hi"}),
    ],
)  # fmt: skip
async def test_a_byte_order_mark_is_ignored(connect: Any, url: str, body: Any) -> None:
    client = connect(FakeEngine("Hello"))
    text = json.dumps(body).encode()
    answer = await client.post(url, content=BOM + text, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    twice = await client.post(url, content=BOM + BOM + text, headers=HEADERS)
    assert twice.status_code == 400


async def test_a_mark_alone_is_not_json(connect: Any) -> None:
    answer = await connect().post(URL, content=BOM, headers=HEADERS)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("the body is not valid JSON: it ends")


def nested(depth: int, opening: bytes, closing: bytes) -> bytes:
    """A body so many levels deep, of which it is itself the first."""
    return b'{"prompt": "x", "q": ' + opening * (depth - 1) + b"1" + closing * (depth - 1) + b"}"


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
async def test_a_body_that_is_nested_too_deeply(
    connect: Any, opening: bytes, closing: bytes
) -> None:
    client = connect(FakeEngine("Hello"))
    body = nested(MAX_DEPTH, opening, closing)
    assert (await client.post(URL, content=body, headers=HEADERS)).status_code == 200
    for depth in (MAX_DEPTH + 1, 20_000):
        body = nested(depth, opening, closing)
        answer = await client.post(URL, content=body, headers=HEADERS)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["message"] == (
            f"the body is nested {depth} levels deep; it may have at most {MAX_DEPTH} levels of "
            "objects and lists"
        )
        assert error["headrace_code"] == "HR-REQ-006"


def test_nesting_is_that_of_a_decoder() -> None:
    def deep(value: Any) -> int:
        held = value.values() if isinstance(value, dict) else value
        return 1 + max(map(deep, held), default=0) if isinstance(value, (dict, list)) else 0

    for value in (
        1, "[[[", [], {}, [[], [[{"a": []}]], {}], {'"[': '\\"[[', "b": [1, "]"]},
        {"a\\": ["\\\\", "[\\\"["]}, [["x" * 300_000, [["\\" * 140_000]]], [[[1]]]],
    ):  # fmt: skip
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only).encode()
            assert nesting(text) == deep(value), text[:100]
    assert nesting(b"[" * 300_000) == 300_000


@pytest.mark.parametrize(
    "path", ["/update_weights", "/swap_weights", "/scale_elastic_ep", "/init_weight_update_group"]
)
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a"', "it ends too early (line 1, column 5)"),
        (b'{"a": 1} x', "more text behind the value (line 1, column 10)"),
        (b'{"a": "\xff"}', "not UTF-8 (line 1, column 8)"),
        (b'{"a": "\xed\xa0\x80"', "not UTF-8 (line 1, column 8)"),
        (b"[" * 60_000, "it is nested too deeply"),
    ],
)
async def test_bodies_of_control_routes_are_refused_in_the_same_words(
    connect: Any, path: str, body: bytes, why: str
) -> None:
    client = connect(dev_mode=True)
    answer = await client.post(f"http://localhost{path}", content=body, headers=HEADERS)
    error = answer.json()["error"]
    assert (answer.status_code, error["headrace_code"]) == (400, "HR-REQ-006")
    assert error["message"] == f"the body is not valid JSON: {why}"
