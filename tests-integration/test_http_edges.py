"""The edges of a real server: a prefix, HEAD, bodies that are hardly JSON, an error that nobody foresaw."""

from __future__ import annotations

import json

import httpx2
import pytest
from servers import serving

JSON = {"Content-Type": "application/json"}
TEXT = {"prompt": "Hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    """Fails requests whose id begins with ``broken`` after their answer was made."""
    plan = {"HEADRACE_FAILPOINTS": "server.answer=raise(match=broken,times=1000)"}
    words = ("--device", "sim", "--root-path", "/x", "--enable-request-id-headers")
    with serving(*words, environment=plan) as server:
        server.url = server.url.removesuffix("/x")
        yield server


@pytest.fixture(scope="module")
def client(server):
    with httpx2.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_the_prefix_is_the_first_page(client):
    pages = [client.get(path).json() for path in ("/x", "/x/", "/")]
    assert pages[0] == pages[1] == pages[2]
    assert "/v1/models/{name}" in pages[0]["paths"]
    assert client.get("/xx").status_code == 404


def test_head_has_the_head_of_get(client):
    for path in (
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/nowhere",
        "/v1/models",
        "/x",
        "/n",
    ):
        got, head = client.get(path), client.head(path)
        assert head.status_code == got.status_code, path
        assert head.headers.get("content-length") == got.headers["content-length"], path


def test_bodies_that_are_hardly_json(client):
    body = json.dumps(TEXT).encode()
    answer = client.post("/v1/completions", content=b"\xef\xbb\xbf" + body, headers=JSON)
    assert answer.status_code == 200, answer.text
    deep = b'{"prompt": "Hi", "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    answer = client.post("/v1/completions", content=deep, headers=JSON)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message.startswith("the body is nested 5001 levels deep; it may have at most 512 levels")


def test_an_unforeseen_error_is_logged_once(server, client):
    headers = {"X-Request-Id": "broken-1"}
    answer = client.post("/v1/completions", json=TEXT, headers=headers)
    assert answer.status_code == 500
    assert "broken-1" in answer.headers["x-request-id"]
    assert client.post("/v1/completions", json=TEXT).status_code == 200
    server.stop()
    log = "".join(server.log)
    assert log.count("Traceback (most recent call last)") == 1
    assert "request broken-1 failed: RuntimeError" in log
    assert "Exception in ASGI application" not in log
