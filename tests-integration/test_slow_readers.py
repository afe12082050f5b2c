"""A reader that is behind over a real socket: its request waits for it, and then goes on as if it had
never been slow."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from endurance import SIM
from servers import PATIENCE, RunningServer, serving

from headrace_testing.waiting import wait_until

LENGTH = 900
TURN = {"role": "user", "content": "slow"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "slow", "max_tokens": LENGTH, "logprobs": 5},
    "/v1/chat/completions": {
        "messages": [TURN], "max_tokens": LENGTH, "logprobs": True, "top_logprobs": 5,
    },
    "/v1/responses": {
        "input": "slow", "max_output_tokens": LENGTH, "top_logprobs": 5, "store": False,
        "include": ["message.output_text.logprobs"],
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=[(), ("--engine-process",)], ids=["one", "two"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """The engine in the server's process, or in its own."""
    with serving(*SIM, *request.param, "--max-num-seqs", "4") as running:
        yield running


def ask(server: RunningServer, path: str) -> socket.socket:
    """A connection that has asked for a stream and has read nothing of it."""
    address = urlsplit(server.url)
    body = json.dumps({**BODIES[path], "seed": 3, "stream": True, "temperature": 1.0}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((address.hostname, address.port))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
    )
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    client.settimeout(PATIENCE)
    return client


def read(client: socket.socket) -> list[dict[str, Any]]:
    """The events of the rest of the stream."""
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    lines, rest = b"", data.partition(b"\r\n\r\n")[2]
    while rest:  # a chunked body
        size, _, rest = rest.partition(b"\r\n")
        lines, rest = lines + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    found = [line[6:] for line in lines.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def said(path: str, events: list[dict[str, Any]]) -> tuple[str, list[Any]]:
    """The text, and each token's log-probability."""
    text, values = "", []
    for event in events:
        if path == "/v1/responses":
            if event["type"] == "response.output_text.delta":
                text += event["delta"]
                values += [entry["logprob"] for entry in event["logprobs"]]
            continue
        for choice in event["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            block = choice.get("logprobs") or {}
            values += block.get("token_logprobs") or []
            values += [entry["logprob"] for entry in block.get("content") or []]
    return text, values


def nothing_runs(server: RunningServer) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(server.metric(name) for name in names)


@pytest.mark.req("F4")
@pytest.mark.req("REL-06")
@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("path", BODIES)
def test_a_request_waits_for_its_reader(server: RunningServer, path: str) -> None:
    with ask(server, path) as quick:
        expected = said(path, read(quick))
    assert len(expected[1]) >= LENGTH
    before = server.metric("generation_tokens_total")
    slow = [ask(server, path) for _ in range(8)]  # twice as many as run at once
    try:
        wait_until(lambda: server.metric("generation_tokens_total") >= before + 8)
        wait_until(lambda: nothing_runs(server), what="work goes on for nobody")
        wait_until(lambda: server.metric("num_requests_suspended") == 8)
        # Far from the end, and yet nothing runs: seats and blocks are there for others.
        assert server.metric("generation_tokens_total") - before < 8 * LENGTH / 2
        with ask(server, path) as another:
            assert said(path, read(another)) == expected
        for client in slow[:2]:
            assert said(path, read(client)) == expected
    finally:
        for client in slow:
            client.close()
    wait_until(lambda: server.metric("num_requests_suspended") == 0)
    wait_until(lambda: nothing_runs(server), what="those who left are still worked for")
