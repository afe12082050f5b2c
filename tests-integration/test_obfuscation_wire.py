"""``include_obfuscation`` over a socket, on each wire that has it."""

from __future__ import annotations

import json
import urllib.request

import pytest
from servers import serving

from headrace_server.streaming.obfuscation import STEP

HI = [{"role": "user", "content": "Hello! What can you do?"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hello! What can"},
    "/v1/responses": {"input": "Hello! What can you do?"},
    "/inference/v1/generate": {
        "token_ids": [40, 50, 60],
        "sampling_params": {"max_tokens": 12, "ignore_eos": True, "temperature": 0},
    },
}


@pytest.fixture(scope="module")
def server():
    with serving("--enable-responses-store") as running:
        yield running


def events_of(server, path, body, method="POST"):
    data = None if method == "GET" else json.dumps(body).encode()
    request = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().removesuffix(b"\n\n").split(b"\n\n")


def said(events):
    """The texts and tokens of a stream, joined: how they are cut depends on the moment."""
    found = []
    for one in events:
        line = one.rpartition(b"\n")[2].removeprefix(b"data: ")
        data = {} if line == b"[DONE]" else json.loads(line)
        found.append(data["delta"] if isinstance(data.get("delta"), str) else "")
        for choice in data.get("choices") or ():
            delta = choice.get("delta") or choice
            found.append(delta.get("content") or delta.get("text") or "")
            found.extend(f"{token} " for token in choice.get("token_ids") or ())
    return "".join(found)


@pytest.mark.parametrize("path", BODIES)
def test_events_are_padded_where_a_stream_asks_for_it(server, path):
    body = {**BODIES[path], "stream": True}
    if path != "/inference/v1/generate":
        body["temperature"] = 0
    plain = events_of(server, path, body)
    assert not any(b"obfuscation" in one for one in plain)
    off = events_of(server, path, body | {"stream_options": {"include_obfuscation": False}})
    assert not any(b"obfuscation" in one for one in off)
    padded = events_of(server, path, body | {"stream_options": {"include_obfuscation": True}})
    marked = [one for one in padded if b'"obfuscation":"' in one]
    assert len(marked) > 1
    assert all((len(one) + 2) % STEP == 0 for one in marked)
    assert said(padded) == said(plain) != ""


def test_stored_responses_are_read_padded(server):
    body = {"input": "Hello!", "temperature": 0, "stream": True, "store": True}
    first = events_of(server, "/v1/responses", body)
    name = json.loads(first[0].rpartition(b"\n")[2].removeprefix(b"data: "))["response"]["id"]
    again = events_of(server, f"/v1/responses/{name}?stream=true", None, "GET")
    assert not any(b"obfuscation" in one for one in again)
    padded = events_of(
        server, f"/v1/responses/{name}?stream=true&include_obfuscation=true", None, "GET"
    )
    assert any(b'"obfuscation":"' in one for one in padded)
    assert said(padded) == said(again) != ""
