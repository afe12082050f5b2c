from __future__ import annotations

import asyncio
import contextlib

import pytest
import scripted
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.http import BodyChunk, Client, HttpError, _Chunked, events
from headrace_core.errors import ConfigError


@given(st.data())
def test_chunked_bodies_are_read_however_they_are_cut(data):
    chunks = data.draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6))
    wire = (
        b"".join(b"%x;ext=1\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    decoder, body = _Chunked(), b""
    for start, end in zip([0, *cuts], [*cuts, len(wire)]):
        assert not (decoder.complete and wire[start:end])
        body += decoder.feed(wire[start:end])
    assert decoder.complete
    assert body == b"".join(chunks)


@given(st.data())
def test_events_carry_the_time_at_which_they_were_complete(data):
    stream = b"data: 1\n\n: comment\nevent: x\ndata:22\r\n\r\ndata: [DONE]\n\ndata: late\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    bounds = list(zip([0, *cuts], [*cuts, len(stream)]))
    pieces = [BodyChunk(float(i), stream[a:b]) for i, (a, b) in enumerate(bounds)]
    found = list(events(pieces))
    assert [content for _, content in found] == [b"1", b"22"]
    for mark, (at, _) in zip((stream.index(b"1\n") + 1, stream.index(b"22\r\n") + 3), found):
        assert bounds[int(at)][0] <= mark < bounds[int(at)][1]


async def _one(port: int) -> bytes:
    client = Client(f"http://127.0.0.1:{port}/base")
    try:
        return (await client.post("/x", b"{}")).body
    finally:
        client.close()


@contextlib.asynccontextmanager
async def _listening(reply: bytes):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@pytest.mark.parametrize(
    ("reply", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcEXTRA", b"abc"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
)
async def test_every_way_of_ending_a_body(reply, body):
    async with _listening(reply) as port:
        assert await _one(port) == body


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "broke off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"", "without an answer"),
    ],
)
async def test_broken_answers_are_errors(reply, said):
    async with _listening(reply) as port:
        with pytest.raises(HttpError, match=said):
            await _one(port)


async def test_connections_are_used_again():
    with scripted.serving(scripted.Scripted(lambda _: scripted.completion(2))) as server:
        client = Client(server.url)
        for _ in range(3):
            assert (await client.post("/v1/completions", b"{}")).status == 200
        client.close()
        assert server.num_connections == 1


async def test_silence_ends_with_the_timeout():
    with scripted.serving(scripted.Scripted(lambda _: [(60.0, b"late")])) as server:
        client = Client(server.url, timeout=0.05)
        with pytest.raises(HttpError, match=r"within 0\.05 s"):
            await client.post("/v1/completions", b"{}")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://"])
def test_urls_of_other_kinds_are_refused(url):
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        Client(url)
