"""A body, whatever is in it, does not keep others waiting while it is read: who asks for the server's
health meanwhile is answered at once."""

from __future__ import annotations

import json
import threading
import time

import pytest
from fuzz import SERVER
from malformed import Client
from servers import SLACK, serving

LAG = 0.1 * SLACK
"""Seconds that nothing may keep the event loop: a tenth is promised, of a machine that does nothing else."""
ATTEMPTS = 3
MILLION = 10**6
pytestmark = [pytest.mark.req("REL-21"), pytest.mark.req("SEC-13")]


@pytest.fixture(scope="module")
def server():
    """An operator who takes bodies as large as they come."""
    with serving(*SERVER, "--max-body-bytes", "64M") as running:
        yield running


def _named(count: int) -> bytes:
    return b",".join(b'"a%d":1' % i for i in range(count))


def _ids(count: int, form: bytes = b"%d") -> bytes:
    return b",".join(form % (i % 1000) for i in range(count))


def _calls(arguments: str) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]  # fmt: skip
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODIES = {
    "50 MB of unknown fields": (COMPLETION, lambda: b'{"prompt":"x",' + _named(4 * MILLION) + b"}"),
    "unknown fields": (COMPLETION, lambda: b'{"prompt":"x",' + _named(400_000) + b"}"),
    "unknown nested fields": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"x",' + _named(MILLION) + b"}]}",
    ),
    "logit_bias": (
        COMPLETION,
        lambda: (
            b'{"prompt":"x","logit_bias":{'
            + b",".join(b'"%d":1' % i for i in range(4 * MILLION))
            + b"}}"
        ),
    ),
    "numbers that are not ids": (
        COMPLETION,
        lambda: b'{"prompt":[' + _ids(MILLION - 1, b"0.%d") + b"]}",
    ),
    "numbers that are not ids, twice": (
        "/detokenize",
        lambda: b'{"tokens":[' + _ids(MILLION - 1, b"-%d.5") + b"]}",
    ),
    "ids": (COMPLETION, lambda: b'{"prompt":[' + _ids(MILLION - 1) + b"]}"),
    "too many ids": (COMPLETION, lambda: b'{"prompt":[' + _ids(4 * MILLION) + b"]}"),
    "lists": (COMPLETION, lambda: b'{"prompt":[' + b"[]," * (MILLION - 10) + b"[]]}"),
    "texts": (COMPLETION, lambda: b'{"prompt":[' + b'"",' * (4 * MILLION) + b'""]}'),
    "parts": (
        CHAT,
        lambda: (
            b'{"messages":[{"role":"user","content":['
            + b",".join([b'{"type":"text","text":"a"}'] * 400_000)
            + b"]}]}"
        ),
    ),
    "tools": (
        CHAT,
        lambda: (
            b'{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":'
            b'{"name":"f","parameters":{"enum":[' + _ids(4 * MILLION) + b"]}}}]}"
        ),
    ),
    "arguments": (CHAT, lambda: _calls("{" + _named(MILLION).decode() + "}")),
    "arguments of lists": (CHAT, lambda: _calls('{"a": [' + "{}," * (4 * MILLION) + "{}]}")),
    "by its shape": ("/invocations", lambda: b'{"prompt":"x",' + _named(MILLION) + b"}"),
    "as many names as are taken": (
        CHAT,
        lambda: b'{"messages":[{"role":"user","content":"x",' + _named(131_000) + b"}]}",
    ),
    "as many biases as are taken": (
        COMPLETION,
        lambda: b'{"prompt":"x","logit_bias":{' + _named(131_000) + b"}}",
    ),
    "a text of escapes": (COMPLETION, lambda: b'{"prompt":"' + b"\\u0041" * (8 * MILLION) + b'"}'),
    "not JSON": (COMPLETION, lambda: b'{"prompt":"x",' + _named(MILLION) + b",}"),
}


class Heart:
    """Asks for the server's health again and again; knows the longest wait."""

    def __init__(self, url: str) -> None:
        self.longest = 0.0
        self.beats = 0
        self._client = Client(url)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> Heart:
        self._client.send("GET", "/health", b"", {})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _beat(self) -> None:
        while not self._ended.is_set():
            begin = time.monotonic()
            answer = self._client.send("GET", "/health", b"", {})
            assert answer.status == 200
            self.longest = max(self.longest, time.monotonic() - begin)
            self.beats += 1


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("name", BODIES)
def test_reading_a_body_keeps_nobody_waiting(server, name):
    path, make = BODIES[name]
    body = make()
    longest = []
    for _ in range(ATTEMPTS):  # the machine may have been busy
        client = Client(server.url)
        with Heart(server.url) as heart:
            answer = client.post(path, body)
        client.close()
        assert answer.status == 400, answer.body[:300]
        assert heart.beats
        longest.append(heart.longest)
        if heart.longest < LAG:
            return
    pytest.fail(f"{path}: the longest waits were {longest}; {answer.body[:300]!r}")
