"""The one way out: where it goes, what it takes, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_multimodal import fetch
from headrace_multimodal.addresses import is_public
from headrace_multimodal.fetch import Fetcher, FetchError, FetchRefused, FetchRules

pytestmark = pytest.mark.req("SEC-06")

Handler = Callable[["Peer", str, bytes, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A small HTTP server that does as told, for better or worse."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((first, headers, body))
            await self.handler(self, first.split()[1], body, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


@pytest.fixture
async def peer() -> AsyncIterator[Callable[[Handler], Awaitable[Peer]]]:
    """``await peer(handler)``: a :class:`Peer` that listens."""
    servers: list[asyncio.Server] = []

    async def start(handler: Handler) -> Peer:
        made = Peer(handler)
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        servers.append(server)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return made

    yield start
    for server in servers:
        server.close()


async def ok(peer: Peer, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    await writer.drain()


def answering(head: str, body: bytes = b"") -> Handler:
    async def answer(peer: Peer, path: str, sent: bytes, writer: asyncio.StreamWriter) -> None:
        text = head.format(peer=peer.url, path=path)
        writer.write(f"HTTP/1.1 {text}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()

    return answer


LOCAL = FetchRules(private_hosts=frozenset({"127.0.0.1"}))


async def test_reads_and_saves(peer: Callable[[Handler], Awaitable[Peer]], tmp_path: Path) -> None:
    server = await peer(ok)
    async with Fetcher(LOCAL) as fetcher:
        assert await fetcher.read(server.url + "/a?b=c") == b"hello"
        assert await fetcher.save(server.url, tmp_path / "f") == 5
    assert (tmp_path / "f").read_bytes() == b"hello"
    first, headers, _ = server.requests[0]
    assert first == "GET /a?b=c HTTP/1.1"
    assert headers["host"] == server.url.removeprefix("http://")
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
        "169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254",
        "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:db8::1",
        "2001:0:7f00:1::", "no address", "",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "64:ff9b::808:808"]
)
def test_public_addresses(address: str) -> None:
    assert is_public(address)


INNER = [
    "127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.9.9", "192.168.0.7", "169.254.169.254", "0.0.0.0",
    "100.64.3.2", "198.18.0.9", "224.0.0.5",
]  # fmt: skip


def spellings(address: str) -> list[str]:
    """Hosts that some resolver or library takes for an IPv4 address."""
    a, b, c, d = map(int, address.split("."))
    whole = int.from_bytes(bytes((a, b, c, d)))
    return [
        address, address + ".", str(whole), hex(whole), f"0{whole:o}", f"{a}.{(b << 16) + (c << 8) + d}",
        f"{a}.{b}.{(c << 8) + d}", f"0x{a:x}.0x{b:x}.0x{c:x}.0x{d:x}", f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"0x{a:02x}{b:02x}{c:02x}{d:02x}", f"{a}.{b}.{c}.0x{d:x}", f"[::ffff:{address}]",
        f"[::ffff:{whole >> 16:x}:{whole & 0xFFFF:x}]", f"[0:0:0:0:0:FFFF:{address}]",
        f"[64:ff9b::{address}]", f"[2002:{whole >> 16:x}:{whole & 0xFFFF:x}::1]", f"[::{address}]",
        f"%{ord(address[0]):x}{address[1:]}", f"x@{address}", f"example.org\\@{address}",
        address.replace(".", "\u3002"), address.replace(".", "%2e"), f"{address}%00.example.org",
        f"{address}#@example.org", f"{address}?@example.org",
    ]  # fmt: skip


CORPUS = [
    f"{scheme}://{host}{rest}"
    for address in INNER
    for host in spellings(address)
    for scheme, rest in (("http", "/x"), ("https", ":8443/x"))
]


async def test_a_corpus_of_inner_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """However an inner address is spelled, nothing is connected to."""
    assert len(CORPUS) >= 300
    connected: list[str] = []

    async def send(request: Any, **_: object) -> None:
        connected.append(str(request.url))
        raise OSError

    async with Fetcher(FetchRules()) as fetcher:
        monkeypatch.setattr(fetcher._client, "send", send)
        for url in CORPUS:
            with pytest.raises(FetchError):
                await fetcher.read(url)
    assert connected == []


async def resolves_to(*addresses: str) -> list[str]:
    return list(addresses)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost/", "http://127.1/", "http://0x7f.1/",
        "http://2130706433/", "http://[::1]/", "http://[::ffff:127.0.0.1]/", "http://0/",
        "file:///etc/passwd", "ftp://example.org/", "gopher://example.org/", "data:,x", "//example.org/",
        "example.org", "", "http://", "http:///x", "http://user@example.org/",
        "http://user:word@example.org/", "http://example.org\\@127.0.0.1/", "http://exa mple.org/",
        "http://example.org/\r\nX: y", "http://example.org/\n", "http://127.0.0.1%2f.org/",
        "http://%31%32%37.0.0.1/", "http://" + "a" * 9000 + "/", "http://example.org:99999/", "javascript:1",
    ],
)  # fmt: skip
async def test_refused_urls_make_no_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd spellings of addresses are what the system makes of them, and that is checked."""

    async def no_connection(*_: object, **__: object) -> None:
        raise AssertionError("connected")

    async with Fetcher(FetchRules()) as fetcher:
        monkeypatch.setattr(fetcher._client, "send", no_connection)
        with pytest.raises(FetchError):
            await fetcher.read(url)
        with pytest.raises(FetchError):
            await fetcher.put(url, b"x", attempts=1)


async def test_of_several_addresses_all_must_be_public() -> None:
    async with Fetcher(
        FetchRules(), resolve=lambda host, port: resolves_to("8.8.8.8", "10.0.0.1")
    ) as fetcher:
        with pytest.raises(FetchRefused, match="not public"):
            await fetcher.read("http://example.org/")


async def test_a_name_is_resolved_once(peer: Callable[[Handler], Awaitable[Peer]]) -> None:
    """A name that changes its address meanwhile (rebinding) leads nowhere else."""
    server = await peer(ok)
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["192.0.2.1"]

    rules = FetchRules(private_hosts=frozenset({"files.example"}))
    port = server.url.rpartition(":")[2]
    async with Fetcher(rules, resolve=resolve) as fetcher:
        assert await fetcher.read(f"http://files.example:{port}/") == b"hello"
    assert asked == ["files.example"]
    assert server.requests[0][1]["host"] == f"files.example:{port}"


async def test_lists_of_hosts(peer: Callable[[Handler], Awaitable[Peer]]) -> None:
    server = await peer(ok)
    rules = FetchRules(allowed_hosts=frozenset({"127.0.0.1"}))
    async with Fetcher(rules) as fetcher:
        assert await fetcher.read(server.url) == b"hello"
        with pytest.raises(FetchRefused, match="allowed"):
            await fetcher.read("https://example.org/")


async def test_redirects_are_checked(peer: Callable[[Handler], Awaitable[Peer]]) -> None:
    inner = await peer(ok)
    hidden = inner.url.replace("127.0.0.1", "localhost")
    outer = await peer(answering(f"302 Found\r\nLocation: {hidden}/secret"))
    async with Fetcher(LOCAL) as fetcher:
        with pytest.raises(FetchRefused, match="not public"):
            await fetcher.read(outer.url)
    assert inner.requests == []
    for target in ("file:///etc/passwd", "http://user@127.0.0.1/", "gopher://x/", "http://[/"):
        outer = await peer(answering(f"302 Found\r\nLocation: {target}"))
        async with Fetcher(LOCAL) as fetcher:
            with pytest.raises(FetchRefused):
                await fetcher.read(outer.url)


async def test_redirects_are_followed_and_counted(
    peer: Callable[[Handler], Awaitable[Peer]],
) -> None:
    async def hop(peer: Peer, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        left = int(path[1:])
        head = f"307 Go\r\nLocation: /{left - 1}" if left else "200 OK"
        await answering(head, b"" if left else b"end")(peer, path, body, writer)

    server = await peer(hop)
    async with Fetcher(LOCAL) as fetcher:
        assert await fetcher.read(server.url + "/5") == b"end"
        with pytest.raises(FetchRefused, match="redirects"):
            await fetcher.read(server.url + "/6")
    async with Fetcher(FetchRules(allow_private=True, max_redirects=0)) as fetcher:
        with pytest.raises(FetchRefused):
            await fetcher.read(server.url + "/1")


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ("404 No", b"", "404"),
        ("500 No", b"", "500"),
        ("200 OK\r\nContent-Encoding: gzip", b"x", "compressed"),
        ("200 OK", b"x" * 2000, "larger"),
    ],
)
async def test_answers_that_are_no_file(
    peer: Callable[[Handler], Awaitable[Peer]], head: str, body: bytes, said: str
) -> None:
    server = await peer(answering(head, body))
    rules = FetchRules(allow_private=True, max_bytes=1000)
    async with Fetcher(rules) as fetcher:
        with pytest.raises(FetchError, match=said):
            await fetcher.read(server.url + "/?secret=1")


ENDLESS = 1 << 30
_CAP = 1 << 20


@pytest.mark.req("F12")
@pytest.mark.req("SEC-07")
@pytest.mark.parametrize(
    ("head", "said"),
    [
        ("200 OK\r\nContent-Length: 9999999999999", "larger"),
        ("200 OK\r\nContent-Length: 18446744073709551616", None),
        ("200 OK\r\nContent-Length: -1", None),
        ("200 OK\r\nContent-Length: 5\r\nContent-Length: 7", None),
        ("200 OK", "larger"),  # until the connection ends, which it does not
        ("200 OK\r\nTransfer-Encoding: chunked", None),  # and then no chunks
        ("200 OK\r\nContent-Encoding: gzip", "compressed"),
        ("404 No", "404"),
        ("500 No\r\nRetry-After: 0", "500"),
        ("302 Found\r\nLocation: /again", "redirects"),
        ("200 OK\r\nA: ", None),  # a head without an end
        ("1" * 1000, None),
    ],
)
async def test_hostile_hosts_get_rid_of_no_byte_past_the_cap(
    peer: Callable[[Handler], Awaitable[Peer]], tmp_path: Path, head: str, said: str | None
) -> None:
    """Hosts that send without end: the connection is closed once the cap is reached."""
    taken = [0]

    async def endless(peer: Peer, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        ends = b"" if head.endswith(": ") or head[0] == "1" else b"\r\n\r\n"
        writer.write(b"HTTP/1.1 " + head.encode() + ends)
        while taken[0] < ENDLESS:
            writer.write(b"x" * 65536)
            await writer.drain()
            taken[0] += 65536

    server = await peer(endless)
    path = tmp_path / "file"
    async with Fetcher(FetchRules(allow_private=True, max_bytes=_CAP)) as fetcher:
        with pytest.raises(FetchError, match=said):
            await fetcher.save(server.url + "/media", path)
    assert path.stat().st_size <= _CAP
    # The rest of what the host sent lies in the buffers of its connections' sockets.
    assert taken[0] < (_CAP + (16 << 20)) * len(server.requests)


async def test_slow_and_broken_answers(
    peer: Callable[[Handler], Awaitable[Peer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def drip(peer: Peer, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        writer.write(b"x")
        await writer.drain()
        if path != "/break":
            await asyncio.Event().wait()  # until the test is over

    server = await peer(drip)
    async with Fetcher(FetchRules(allow_private=True, seconds=0.5)) as fetcher:
        with pytest.raises(FetchError, match=r"longer than|broke off"):
            await fetcher.read(server.url + "/stall")
    monkeypatch.setattr(fetch, "GRACE", 0.0)
    rules = FetchRules(allow_private=True, seconds=60.0, min_bytes_per_second=1e9)
    async with Fetcher(rules) as fetcher:
        with pytest.raises(FetchError, match="slower"):
            await fetcher.read(server.url + "/drip")
    async with Fetcher(LOCAL) as fetcher:
        with pytest.raises(FetchError, match="broke off"):
            await fetcher.read(server.url + "/break")
        with pytest.raises(FetchError, match=r"ConnectError|refused"):
            await fetcher.read("http://127.0.0.1:1/")


@pytest.mark.parametrize("as_file", [False, True])
async def test_put(
    peer: Callable[[Handler], Awaitable[Peer]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    as_file: bool,
) -> None:
    """Sent whole, with its length, again where the server is busy, and not where it refuses."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def no_sleep(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(fetch.asyncio, "sleep", no_sleep)
    statuses = ["503 Busy", "200 OK"]

    async def take(peer: Peer, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        await answering(statuses.pop(0) if path == "/busy" else "403 No")(peer, path, body, writer)

    server = await peer(take)
    data = b"0123456789" * 50_000
    (tmp_path / "f").write_bytes(data)
    async with Fetcher(LOCAL) as fetcher:
        await fetcher.put(server.url + "/busy", tmp_path / "f" if as_file else data)
        assert [body for _, _, body in server.requests] == [data, data]
        assert "transfer-encoding" not in server.requests[0][1]
        assert pauses
        with pytest.raises(FetchError, match="403"):
            await fetcher.put(server.url + "/no", data)
        assert len(server.requests) == 3


async def test_the_environment_has_no_say(
    peer: Callable[[Handler], Awaitable[Peer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await peer(ok)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NETRC", "/dev/null")
    async with Fetcher(LOCAL) as fetcher:
        assert await fetcher.read(server.url) == b"hello"
    assert "authorization" not in server.requests[0][1]
