"""Requests that are wrong in every way we could think of, and what an answer to them may be.

Bodies: every field of every POST route of the server's own OpenAPI document, with each of
:data:`NASTY` in place of its value. Heads and framing: :data:`RAW`, sent as they stand. A bug that is
fixed adds what caused it to one of the lists.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

SLOW = 4.0
"""Seconds that no answer may take: one is promised, of a machine that does nothing else."""

NASTY: tuple[str, ...] = (
    "null", "true", "false", "0", "-1", "1", "2147483648", "9007199254740993", "-9223372036854775809",
    "18446744073709551616", "1" + "0" * 400, "0.5", "-0.0", "1e308", "1e-320", "1e999", "-1e999",
    '""', '" "', '"x"', '"' + "x" * 10_000 + '"', '"\\u0000"', '"\\ud800"', '"\\udc00x"',
    '"../../../etc/passwd"', '"{{ 7 * 7 }}"', '"%s%n"', '"__class__"', '"\\u202e"', '"auto"', '"1"',
    "[]", "[[]]", "[null]", "[1, 2, 3]", "[-1]", '["", ""]', "[" + "0," * 5000 + "0]", "[[[[[1]]]]]",
    "{}", '{"": {}}', '{"a": {"b": [{}]}}', '{"type": "x"}', '[{"type": "text"}]', '[{"role": "user"}]',
    '[{"role": "user", "content": [{"type": "text"}]}]', '[{"role": 1, "content": {}}]',
    '{"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}',
    '{"1": 5, "-1": 5}', '{"x": 1e999}', '[{"function": {"name": ""}}]', '{"include_usage": []}',
    "[" * 150 + "]" * 150, '{"a":' * 150 + "1" + "}" * 150,
)  # fmt: skip
"""JSON values, as they go over the wire."""

BROKEN: tuple[bytes, ...] = (
    b"", b" ", b"{", b"}", b"[", b"nul", b"NaN", b"Infinity", b'{"prompt": NaN}', b'{"prompt": "x"',
    b'{"prompt": "x",}', b"{'prompt': 'x'}", b'{"prompt": "x"} {}', b'{"prompt": "x"}garbage',
    b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}',
    '{"prompt": "x"}'.encode("utf-16"), b"\x00" * 100, b"prompt=x&max_tokens=1", b"<a/>", b'"x"', b"1",
    b"true", b"null", b"[]", b"[1]", b'{"prompt": "\\x"}', b'{"prompt": "\n"}', b'{"a": 01}', b'{"a": .5}',
    b'{"a": +1}', b'{"a": 1e}', b"[" * 100_000, b'{"a":' * 100_000, b"[" * 1000 + b"]" * 1000,
    b'{"prompt": "x", "prompt": []}', b"/* c */ {}", b'{"\\ud800": 1}', b"9" * 100_000, b"-", b"\x1f\x8b\x08",
)  # fmt: skip
"""Bodies that are not a JSON object, or hardly one."""

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_BODY = b'{"prompt": "x", "max_tokens": 1}'
_LENGTH = b"Content-Length: %d\r\n\r\n" % len(_BODY)

RAW: tuple[bytes, ...] = (
    b"",
    b"\r\n",
    b"\r\n\r\n",
    b"\n\n",
    b"\x00" * 64,
    b"GET",
    b"GET /",
    b"GET /health",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: x\n\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1\r\nHost: x\r\n\r\n",
    b"GET /health http/1.1\r\nHost: x\r\n\r\n",
    b"get /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"G\x00T /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"TRACE /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET  /health  HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET\t/health\tHTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1 x\r\nHost: x\r\n\r\n",
    b"GET http://x/health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET //health HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%ff%fe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health?%00=%ff&&&=== HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health#f HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET ? HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: \r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x y\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: \xff\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA\x00B: c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 300 + b"\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"b" * 1000 + b": c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: \x01\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + b"i" * 5000 + b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer\xff\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabc",
    _POST + b"\r\n",
    _POST + _LENGTH,
    _POST + _LENGTH + _BODY[:10],
    _POST + _LENGTH + _BODY + b"more",
    _POST + b"Content-Length: -1\r\n\r\n" + _BODY,
    _POST + b"Content-Length: x\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 1e3\r\n\r\n" + _BODY,
    _POST + b"Content-Length: +5\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 99999999999999999999\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 5, 5\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 070000000\r\n\r\n" + _BODY,
    _POST + b"Content-Length: 32\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
    _POST + b"Content-Length:\r\n 32\r\n\r\n" + _BODY,
    _POST + b"A: b\rContent-Length: 32\r\n\r\n" + _BODY,
    _POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffffff\r\nx",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 20_000 + b"\r\n{\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: gzip\r\n\r\n" + _BODY,
    _POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: b\r\n\r\n",
    _POST + b"Content-Encoding: gzip\r\n" + _LENGTH + _BODY,
    _POST + b"Content-Encoding: br\r\n" + _LENGTH + _BODY,
    _POST + b"Content-Type: text/plain\r\n" + _LENGTH + _BODY,
    _POST + b"Content-Length: 70000000\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json; charset=utf-16\r\n"
    + _LENGTH
    + _BODY,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: \xff\r\n" + _LENGTH + _BODY,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + _LENGTH + _BODY,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200,
    b"SSH-2.0-OpenSSH_9\r\n",
    b"EHLO x\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 50,
    _POST + _LENGTH + _BODY + b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
)
"""Whole connections."""

_BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/chat/completions/batch": {
        "messages": [[{"role": "user", "content": "x"}]],
        "max_tokens": 1,
    },
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/v1/embeddings": {"input": "x"},
    "/v2/embed": {"texts": ["x"]},
    "/classify": {"input": "x"},
    "/pooling": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/v1/score": {"queries": "x", "documents": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
    "/v1/rerank": {"query": "x", "documents": [{"text": "y"}]},
    "/v2/rerank": {"query": "x", "documents": {"content": [{"type": "text", "text": "y"}]}},
}
"""A right body of each route; of others: an empty one."""

_TELLING = re.compile(
    r"/(?:root|home|usr|tmp|opt|etc|var|proc)/|site-packages|\.py\b|0x[0-9a-fA-F]{6,}|Traceback"
    r"|\b(?!BadRequest|NotFound|InternalServer|RateLimit|ServiceUnavailable|Permission|API|"
    r"Authentication|Conflict|Unprocessable|Timeout|MethodNotAllowed)[A-Z]\w*(?:Error|Exception)\b"
)
"""Paths, addresses, foreign exceptions."""


@dataclass
class Answer:
    """What came back."""

    status: int
    """0: the connection was closed without an answer."""
    body: bytes
    seconds: float

    def problem(self, sent: bytes) -> str:
        """What is wrong with it; empty: nothing. What the client itself sent may be repeated."""
        if self.status >= 500:
            return f"status {self.status}: {self.body[:300]!r}"
        if self.seconds > SLOW:
            return f"took {self.seconds:.1f} s"
        if self.status >= 400:
            text, own = self.body.decode("utf-8", "replace"), sent.decode("utf-8", "replace")
            found = [m.group() for m in _TELLING.finditer(text) if m.group() not in own]
            if found:
                return f"tells {found[0]!r}: {text[:300]}"
        return ""


class Client:
    """One connection that is kept, and opened again when the server closes it."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._connection = self._open()

    def _open(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.hostname, self._address.port, timeout=30)

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Send one request and read its whole answer."""
        for fresh in (False, True):
            begin = time.monotonic()
            try:
                self._connection.request(method, path, body, headers)
                got = self._connection.getresponse()
                return Answer(got.status, got.read(), time.monotonic() - begin)
            except (http.client.HTTPException, OSError):
                self.close()
                self._connection = self._open()
                if fresh:
                    return Answer(0, b"", time.monotonic() - begin)
        raise AssertionError("not reached")

    def post(self, path: str, body: bytes) -> Answer:
        """A JSON body, right or wrong."""
        return self.send("POST", path, body, {"Content-Type": "application/json"})

    def close(self) -> None:
        self._connection.close()


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(path, body) of every POST route: broken bodies, and nasty values in each field."""
    for path, operations in document["paths"].items():
        if "post" not in operations or "{" in path:
            continue
        for broken in BROKEN:
            yield path, broken
        base = _BASES.get(path, {})
        for field in _fields(document, operations["post"]):
            rest = {name: value for name, value in base.items() if name != field}
            head = json.dumps(rest)[:-1] + (", " if rest else "") + json.dumps(field) + ": "
            for value in NASTY:
                yield path, (head + value + "}").encode()


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    found: set[str] = {"unknown_field"}
    pending = [schema]
    while pending:
        part = pending.pop()
        while "$ref" in part:
            part = document["components"]["schemas"][part["$ref"].rpartition("/")[2]]
        pending += [*part.get("anyOf", []), *part.get("oneOf", []), *part.get("allOf", [])]
        found |= set(part.get("properties", {}))
    return sorted(found)


def exchange(url: str, data: bytes) -> Answer:
    """Send bytes on a connection of their own, close our half, read what comes."""
    address = urlsplit(url)
    begin = time.monotonic()
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        got = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                got += piece
        except (TimeoutError, ConnectionError):
            pass
    match = re.match(rb"HTTP/1\.[01] (\d{3})", got)
    return Answer(int(match[1]) if match else 0, got, time.monotonic() - begin)


def mutations(count: int, seed: int) -> Iterator[bytes]:
    """Right and wrong connections with bytes changed, cut out, doubled or spliced."""
    rng = random.Random(seed)
    sources = [data for data in RAW if 0 < len(data) < 2000] + [_POST + _LENGTH + _BODY] * 20
    for _ in range(count):
        data = bytearray(rng.choice(sources))
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            kind = rng.randrange(5)
            if kind == 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif kind == 1:
                del data[at : at + rng.randint(1, 8)]
            elif kind == 2:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            elif kind == 3:
                data[at:at] = rng.choice(
                    (b"\r\n", b"\x00", b": ", b" ", b"%00", b"\xff", b",", b'"')
                )
            else:
                other = rng.choice(sources)
                data[at:] = other[rng.randrange(len(other)) :]
        yield bytes(data)
