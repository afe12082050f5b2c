"""The one way out: every file that headrace fetches from, or sends to, an address given to it.

A name is resolved once and the connection goes to the address that was checked, so that a name
which changes its address meanwhile leads nowhere else. Redirects are followed by hand, each checked
like the first URL. Size, time and speed are bounded while bytes come, not afterwards. Nothing from
the environment is used: no proxies, no credentials.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import httpx2

from headrace_core.errors import HeadraceError
from headrace_multimodal.addresses import is_public

logger = logging.getLogger(__name__)

MAX_URL = 8192
GRACE = 5.0
"""Seconds before a transfer's speed matters."""
_CHUNK = 256 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host name, port) -> addresses."""


class FetchError(HeadraceError):
    """A file could not be fetched or sent."""


class FetchRefused(FetchError):
    """The rules forbid it; nothing was connected to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRules:
    """Where a :class:`Fetcher` may go and how much it may take."""

    schemes: tuple[str, ...] = ("https", "http")
    allowed_hosts: frozenset[str] | None = None
    """If given, no other hosts, and these whatever their addresses."""
    private_hosts: frozenset[str] = frozenset()
    """Hosts that may have addresses which are not public: the operator named them."""
    allow_private: bool = False
    """All hosts may."""
    max_redirects: int = 5
    max_bytes: int = 64 << 20
    seconds: float = 60.0
    """Seconds of one transfer, redirects included."""
    min_bytes_per_second: float = 1024.0

    def lasting(self, seconds: float, *, max_bytes: int) -> FetchRules:
        """The same rules with other limits of time and size."""
        return replace(self, seconds=seconds, max_bytes=max_bytes)

    def without_redirects(self) -> FetchRules:
        """The same rules; a redirect is refused."""
        return replace(self, max_redirects=0)


class Fetcher:
    """Fetches and sends files under fixed rules. Use as an async context manager.

    Args:
        rules: see there.
        resolve: name resolution; the system's by default.
    """

    def __init__(self, rules: FetchRules, *, resolve: Resolve | None = None) -> None:
        self.rules = rules
        self._resolve = resolve or resolve_name
        self._client = httpx2.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=httpx2.Timeout(10.0, read=rules.seconds, write=rules.seconds),
            # A connection belongs to the name it was made for; the pool would know it by address.
            limits=httpx2.Limits(max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Fetcher:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._client.aclose()

    async def read(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            FetchRefused: the rules forbid it.
            FetchError: it failed, or is larger or slower than allowed.
        """
        async with self._bounded(), self._open(url) as response:
            return b"".join([piece async for piece in self._pieces(response)])

    async def save(self, url: str, path: Path) -> int:
        """Write the bytes behind a URL to a file; returns their number.

        Raises: as :meth:`read`, and OSError of the file.
        """
        size = 0
        with path.open("wb") as file:
            async with self._bounded(), self._open(url) as response:
                async for piece in self._pieces(response):
                    size += await asyncio.to_thread(file.write, piece)
        return size

    async def put(self, url: str, source: bytes | Path, *, attempts: int = 5) -> None:
        """Send bytes or a file with PUT, as presigned URLs want it; tries again where that helps.

        Raises:
            FetchRefused: the rules forbid it.
            FetchError: it failed each time.
        """
        said = ""
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(min(30.0, 0.5 * 2**attempt))
            try:
                async with self._bounded():
                    status = await self._put_once(url, source)
            except FetchRefused:
                raise
            except FetchError as error:
                said = str(error)
            else:
                if 200 <= status < 300:
                    return
                said = f"the server answered {status}"
                if status not in _RETRIED:
                    break
            logger.warning("sending to %s: %s (attempt %d)", _shown(url), said, attempt + 1)
        raise FetchError(f"{_shown(url)}: could not be sent: {said}")

    async def _put_once(self, url: str, source: bytes | Path) -> int:
        size = len(source) if isinstance(source, bytes) else source.stat().st_size
        content = source if isinstance(source, bytes) else _file_pieces(source)
        request = await self._request("PUT", url, {"Content-Length": str(size)}, content)
        response = await self._send(request, url)
        await response.aclose()
        return response.status_code

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.rules.seconds):
                yield
        except TimeoutError:
            raise FetchError(f"took longer than {self.rules.seconds:g} s") from None

    @asynccontextmanager
    async def _open(self, url: str) -> AsyncIterator[httpx2.Response]:
        """The answer that stands at the end of redirects."""
        for _ in range(self.rules.max_redirects + 1):
            request = await self._request("GET", url, {"Accept-Encoding": "identity"})
            response = await self._send(request, url)
            try:
                if response.status_code not in _REDIRECTS:
                    _check_answer(response, url)
                    yield response
                    return
                url = _redirected(url, response)
            finally:
                await response.aclose()
        raise FetchRefused(f"{_shown(url)}: more than {self.rules.max_redirects} redirects")

    async def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        content: bytes | AsyncIterator[bytes] | None = None,
    ) -> httpx2.Request:
        """A request to the checked address of a URL's host."""
        parsed = self._parse(url)
        address = await self._address(parsed)
        return self._client.build_request(
            method,
            parsed.copy_with(host=address),
            headers={**headers, "Host": parsed.netloc.decode("ascii")},
            content=content,
            extensions={"sni_hostname": parsed.raw_host.decode("ascii")},
        )

    async def _send(self, request: httpx2.Request, url: str) -> httpx2.Response:
        try:
            return await self._client.send(request, stream=True)
        except (httpx2.HTTPError, OSError) as error:
            raise FetchError(f"{_shown(url)}: {type(error).__name__}") from error

    def _parse(self, url: str) -> httpx2.URL:
        rules = self.rules
        if len(url) > MAX_URL or not url.isprintable() or any(c in url for c in " \\"):
            raise FetchRefused("a URL must be shorter, without spaces, backslashes and controls")
        try:
            parsed = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise FetchRefused(f"{_shown(url)}: is not a URL") from error
        if parsed.scheme not in rules.schemes:
            raise FetchRefused(f"{_shown(url)}: must begin with one of {list(rules.schemes)}")
        host = parsed.host
        if not host or "%" in host or parsed.userinfo:
            raise FetchRefused(f"{_shown(url)}: must have a plain host and no user name")
        if rules.allowed_hosts is not None and host not in rules.allowed_hosts:
            raise FetchRefused(f"{_shown(url)}: host {host!r} is not on the list of allowed ones")
        return parsed

    async def _address(self, url: httpx2.URL) -> str:
        """Where to connect. Of several addresses all must be allowed."""
        rules, host = self.rules, url.host
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            found = await self._resolve(url.raw_host.decode("ascii"), port)
        except OSError as error:
            raise FetchError(f"host {host!r} could not be found") from error
        if not found:
            raise FetchError(f"host {host!r} could not be found")
        free = rules.allow_private or host in rules.private_hosts or rules.allowed_hosts is not None
        if not free and not all(map(is_public, found)):
            raise FetchRefused(f"host {host!r} has an address that is not public")
        return found[0]

    async def _pieces(self, response: httpx2.Response) -> AsyncIterator[bytes]:
        rules, clock = self.rules, asyncio.get_running_loop().time
        started, size = clock(), 0
        try:
            async for piece in response.aiter_raw():
                size += len(piece)
                if size > rules.max_bytes:
                    raise FetchError(f"is larger than {rules.max_bytes} bytes")
                elapsed = clock() - started
                if elapsed > GRACE and size < rules.min_bytes_per_second * elapsed:
                    raise FetchError(f"comes slower than {rules.min_bytes_per_second:g} bytes/s")
                yield piece
        except (httpx2.HTTPError, OSError) as error:
            raise FetchError(f"broke off: {type(error).__name__}") from error


async def resolve_name(host: str, port: int) -> list[str]:
    """The system's addresses of a host.

    Raises:
        OSError: there are none, or it is no name.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # an empty label, or one that is too long
        raise OSError(f"not a host name: {error}") from error
    return [str(entry[4][0]) for entry in found]


def _check_answer(response: httpx2.Response, url: str) -> None:
    if response.status_code != 200:
        raise FetchError(f"{_shown(url)}: the server answered {response.status_code}")
    if response.headers.get("content-encoding", "identity") != "identity":
        raise FetchError(f"{_shown(url)}: comes compressed, though that was not asked for")


def _redirected(url: str, response: httpx2.Response) -> str:
    location = response.headers.get("location", "")
    try:
        target = httpx2.URL(url).join(location)
    except httpx2.InvalidURL as error:
        raise FetchRefused(f"{_shown(url)}: redirects to something that is not a URL") from error
    if httpx2.URL(url).scheme == "https" and target.scheme != "https":
        raise FetchRefused(f"{_shown(url)}: redirects away from https")
    return str(target)


async def _file_pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := await asyncio.to_thread(file.read, _CHUNK):
            yield piece


def _shown(url: str) -> str:
    """A URL without its query, which in presigned ones is a secret."""
    return repr(url.partition("?")[0][:200])
