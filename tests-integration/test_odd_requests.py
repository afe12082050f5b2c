"""An attacker's requests on the wire and in the log: framing that two servers could read in two ways is
refused and the connection closed; keys in an address reach no log; a request's template is not even parsed in
the server."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest
from forks import run_command
from fuzz import SERVER
from malformed import Client, exchange
from servers import PATIENCE, serving

from headrace_testing.waiting import wait_until

BODY = b'{"prompt": "x", "max_tokens": 1}'
NEXT = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server():
    words = [word for word in SERVER if word != "--disable-uvicorn-access-log"]
    with serving(*words, "--trust-request-chat-template", "--enable-log-requests") as running:
        yield running


def statuses(server, data: bytes, size: int = 1 << 20) -> tuple[list[int], bytes]:
    """(statuses, bytes) of the answers on one connection, which the server closes; data goes in pieces."""
    address = urlsplit(server.url)
    got = b""
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        try:
            for at in range(0, len(data), size):
                connection.sendall(data[at : at + size])
            while piece := connection.recv(65536):
                got += piece
        except ConnectionError:
            pass  # it was cut while we sent
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", got)], got


AMBIGUOUS = {
    "length and chunks": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "chunks and length": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "chunks and a length of nothing": POST + CHUNKED + b"Content-Length: 0\r\n\r\n" + CHUNKS,
    "two lengths": POST + LENGTH + b"Content-Length: 1\r\n\r\n" + BODY,
    "a length twice": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 32, 32\r\n\r\n" + BODY,
    "chunks twice": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "chunks of HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS,
    "a folded line": POST + LENGTH + b"X-A: b\r\n c\r\n\r\n" + BODY,
    "a folded length": POST + b"Content-Length:\r\n 32\r\n\r\n" + BODY,
    "a line folded by a tab": POST + LENGTH + b"X-A: b\r\n\tc\r\n\r\n" + BODY,
    "a space before the colon": POST + b"Content-Length : 32\r\n\r\n" + BODY,
    "a line that ends with LF": POST + b"X-A: b\n" + LENGTH + b"\r\n" + BODY,
    "a head that ends with LF": POST + LENGTH[:-2] + b"\n\n" + BODY,
    "a CR inside a line": POST + LENGTH + b"X-A: b\rX-B: c\r\n\r\n" + BODY,
}


@pytest.mark.req("SEC-20")
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_framing_is_refused_and_the_connection_closed(server, name):
    """RFC 9112, sections 2.2, 5.2, 6.1 and 6.3. What follows on the connection is not looked at."""
    found, got = statuses(server, AMBIGUOUS[name] + LAST)
    assert found == [400], got
    assert b"connection: close" in got.lower()


@pytest.mark.req("SEC-20")
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_second_request_is_looked_at_in_the_same_way(server, size):
    """On one connection, in pieces of any size."""
    good = POST + LENGTH + b"\r\n" + BODY
    data = good + NEXT + POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS + LAST
    found, got = statuses(server, data, size)
    assert found == [200, 200, 400], got


@pytest.mark.req("SEC-20")
def test_usual_framing_is_taken(server):
    for data in (
        POST + LENGTH + b"\r\n" + BODY,
        POST + CHUNKED + b"\r\n" + CHUNKS,
        POST + b"X-Empty:\r\n" + b"X-A:  b \t c \r\n" + LENGTH + b"\r\n" + BODY,
    ):
        assert statuses(server, data + LAST)[0] == [200, 200]


SECRET = "c4nary-in-an-address"


@pytest.mark.req("SEC-19")
@pytest.mark.req("SEC-25")
@pytest.mark.parametrize("words", [(), ("--uvicorn-log-level", "trace", "--log-format", "json")])
def test_keys_in_an_address_reach_no_log(words):
    options = [word for word in SERVER if word != "--disable-uvicorn-access-log"]
    with serving(*options, *words) as server:
        for name in (
            "api_key",
            "key",
            "access_token",
            "API-KEY",
            "%61pi_key",
            "x-api-key",
            "token",
        ):
            for path in ("/v1/models", "/nothing", "/version", "/v1/responses/resp_1"):
                client = Client(server.url)
                answer = client.send("GET", f"{path}?limit=3&{name}={SECRET}&x=1", b"", {})
                client.close()
                assert SECRET.encode() not in answer.body
        exchange(server.url, b"GET /version?key=%b HTTP/1.1\r\nA b\r\n\r\n" % SECRET.encode())
        exchange(server.url, b"GET /x y?key=%b HTTP/1.1\r\nHost: x\r\n\r\n" % SECRET.encode())
        wait_until(lambda: sum("limit=3" in line for line in server.log) >= 28)
    text = "".join(server.log)
    assert SECRET not in text, next(line for line in server.log if SECRET in line)
    assert "/v1/models?limit=3&api_key=***&x=1" in text


@pytest.mark.req("SEC-17")
@pytest.mark.parametrize("scope", ["all", "v1"])
def test_metrics_are_protected_whatever_the_scope(scope):
    words = ("--protect-metrics", "--api-key-scope", scope)
    with serving(*SERVER, *words, environment={"HEADRACE_API_KEY": "canary-key"}) as server:
        for path in ("/metrics", "/%6detrics", "/metrics?x=1"):
            assert server.status(path) == 401, path
        head = urllib.request.Request(server.url + "/metrics", method="HEAD")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(head, timeout=PATIENCE)
        allowed = urllib.request.Request(
            server.url + "/metrics", headers={"Authorization": "Bearer canary-key"}
        )
        with urllib.request.urlopen(allowed, timeout=PATIENCE) as answer:
            assert b"headrace:" in answer.read()
        opened = [line for line in server.log if "need no key" in line]
        assert opened
        assert not any("/metrics" in line for line in opened)


@pytest.mark.req("SEC-17")
def test_protected_metrics_need_a_key():
    started = run_command("serve", *SERVER, "--protect-metrics", "--port", "0", timeout=PATIENCE)
    assert started.returncode != 0
    assert "protect_metrics" in started.stdout + started.stderr
    assert "key" in started.stdout + started.stderr


def _chat(template):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    return json.dumps({**body, "chat_template": template}).encode()


@pytest.mark.req("SEC-05")
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages }}" + "{% if a %}{% endif %}" * 150_000,
        "{% if " + "(" * 50_000 + "a" + ")" * 50_000 + " %}{% endif %}",
        "{% set a = [" + "1," * 500_000 + "] %}x",
    ],
    ids=["long", "deep", "wide"],
)
def test_a_requests_template_is_not_parsed_in_the_server(server, template):
    """Parsing these takes seconds; in the child it is cut off after one, or fails there."""
    client = Client(server.url)
    answer = client.post("/v1/chat/completions", _chat(template))
    assert answer.status == 400, answer.body[:300]
    assert b"template" in answer.body
    assert client.send("GET", "/health", b"", {}).status == 200
    answer = client.post("/v1/chat/completions", _chat("{{ messages[0].content }}"))
    assert answer.status == 200, answer.body[:300]
    client.close()
