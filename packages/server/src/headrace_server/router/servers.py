"""The servers behind a router: which are well, how busy they are, and which one gets a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence

import msgspec

from headrace_server.router.prefixes import PrefixKnowledge, PromptText, Score
from headrace_server.router.settings import RouterSettings
from headrace_server.router.upstream import Headers, Upstream, UpstreamError

logger = logging.getLogger(__name__)

MAX_LIST = 4 * 1024 * 1024
"""Most bytes of a server's list of models."""
MODELS_SECONDS = 30.0
"""Seconds after which a server is asked again what it serves."""
_NEVER_TRIED = "it has not been asked yet"


class Server:
    """One server.

    Args:
        url: its address, without a slash at the end.
        settings: of the router.
        headers: that requests of the router's own carry: its key.
        number: its place among the servers, from 1.
        kind: what clients are told that it is.
    """

    def __init__(
        self,
        url: str,
        settings: RouterSettings,
        headers: Headers = (),
        number: int = 1,
        kind: str = "server",
    ) -> None:
        self.url = url
        self.name = f"{kind} {number}"
        """What clients are told: addresses are the operator's affair."""
        self.upstream = Upstream(url, settings.connect_timeout)
        self.own_headers = headers
        self.is_draining = False
        """Its operator wants it to get no further requests."""
        self.in_flight = 0
        self.problem = _NEVER_TRIED
        """Why it gets no requests; "": it is well."""
        self.models: frozenset[str] | None = None
        """Names of what it serves; None: it has not said."""
        self.num_requests = self.num_failures = 0
        self._learn_at = 0.0
        self._failures_in_a_row = 0
        self._max_failures = settings.max_failures
        self._health_timeout = settings.health_timeout

    @property
    def is_well(self) -> bool:
        return not self.problem

    @property
    def is_available(self) -> bool:
        """True if it may get requests."""
        return self.is_well and not self.is_draining

    def serves(self, model: str | None) -> bool:
        """False if it is known not to serve a model."""
        return model is None or self.models is None or model in self.models

    def succeeded(self) -> None:
        """An answer has begun."""
        self._failures_in_a_row = 0

    def failed(self, reason: str, *, is_down: bool) -> None:
        """A request got no answer.

        Args:
            is_down: nothing listens there: it gets no more requests at once.
        """
        self.num_failures += 1
        self._failures_in_a_row += 1
        if is_down or self._failures_in_a_row >= self._max_failures:
            self._set_problem(reason)

    async def look(self) -> None:
        """Ask whether it is well, and what it serves."""
        try:
            async with asyncio.timeout(self._health_timeout):
                status = await self._get(b"/health")
                if status == 200 and (self.problem or time.monotonic() > self._learn_at):
                    await self._learn_models()
                    self._learn_at = time.monotonic() + MODELS_SECONDS
            # It says itself that it is not well: what it has begun it may still finish.
            self._set_problem("" if status == 200 else f"its /health is a {status}")
        except TimeoutError:
            self._lose(f"no answer to /health within {self._health_timeout:g} s")
        except UpstreamError as error:
            self._lose(str(error))

    def close(self) -> None:
        """Close its idle connections."""
        self.upstream.close()

    async def _get(self, path: bytes) -> int:
        """The status of a GET."""
        answer = await self.upstream.request("GET", path, self.own_headers)
        try:
            await answer.read(MAX_LIST)
        finally:
            answer.close()
        return answer.status

    async def _learn_models(self) -> None:
        answer = await self.upstream.request("GET", b"/v1/models", self.own_headers)
        try:
            body = await answer.read(MAX_LIST)
        finally:
            answer.close()
        self.models = model_names(body) if answer.status == 200 else None

    def _set_problem(self, problem: str) -> None:
        if problem and not self.problem:
            logger.warning("%s gets no requests: %s", self.url, problem)
        elif self.problem and not problem:
            logger.info("%s gets requests", self.url)
        self.problem = problem
        if not problem:
            self._failures_in_a_row = 0

    def _lose(self, problem: str) -> None:
        """Nothing is heard of it: who waits for its answers is told."""
        self._set_problem(problem)
        self.upstream.break_off()


class _Card(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Card]


def model_names(body: bytes) -> frozenset[str] | None:
    """Names in an answer of ``/v1/models``; None: it is no list of models."""
    try:
        return frozenset(card.id for card in msgspec.json.decode(body, type=_List).data)
    except msgspec.MsgspecError:
        return None


class ServerPool:
    """All servers of a router.

    Args:
        settings: of the router.
        prefixes: knows what is cached where.
        key: that the servers want; None: the clients' own is passed on.
        prefills: these are the servers that compute prompts for others.
    """

    def __init__(
        self,
        settings: RouterSettings,
        prefixes: PrefixKnowledge,
        key: str | None = None,
        *,
        prefills: bool = False,
    ) -> None:
        own = [(b"authorization", b"Bearer " + key.encode())] if key else []
        self.key_headers: Headers = own
        urls = [url.rstrip("/") for url in settings.prefill] if prefills else settings.servers
        kind = "prefill server" if prefills else "server"
        self.servers = [Server(url, settings, own, i, kind) for i, url in enumerate(urls, 1)]
        self.prefixes = prefixes
        self._interval = settings.health_interval
        self._max_imbalance = settings.max_imbalance
        self._slack = settings.imbalance_slack
        self._next = 0

    @property
    def available(self) -> list[Server]:
        """Servers that may get requests."""
        return [server for server in self.servers if server.is_available]

    def find(self, url: str) -> Server | None:
        """The server of a URL."""
        return next((one for one in self.servers if one.url == url.rstrip("/")), None)

    async def choose(
        self, prompt: PromptText, model: str | None = None, tried: Collection[Server] = ()
    ) -> Server | None:
        """The server that a request goes to; None: there is none.

        Of those that are not too busy, the one that has most of the prompt; of equals the least busy, in
        turn. Servers that do not serve the model are left out, unless none does: one of them has to
        say so.

        Args:
            tried: servers that have failed at this request.
        """
        able = [server for server in self.available if server not in tried]
        able = [server for server in able if server.serves(model)] or able
        if not able:
            return None
        scores = await self.prefixes.scores(prompt, [server.url for server in able])
        chosen = self._best(able, scores)
        self.prefixes.sent(prompt, chosen.url)
        return chosen

    def _best(self, able: Sequence[Server], scores: Sequence[Score]) -> Server:
        least = min(server.in_flight for server in able)
        most = max(least * self._max_imbalance, least + self._slack)
        scored = [(s, score) for s, score in zip(able, scores) if s.in_flight <= most]
        best = max(score for _, score in scored)
        equal = [server for server, score in scored if score == best]
        least = min(server.in_flight for server in equal)
        equal = [server for server in equal if server.in_flight == least]
        self._next += 1
        return equal[self._next % len(equal)]

    async def watch(self) -> None:
        """Look after the servers' health until cancelled."""
        await asyncio.gather(*map(self._watch_one, self.servers))

    async def look(self) -> None:
        """Look at all servers once."""
        await asyncio.gather(*(server.look() for server in self.servers))

    async def _watch_one(self, server: Server) -> None:
        while True:
            was_well = server.is_well
            await server.look()
            if was_well and not server.is_well:
                self.prefixes.forget(server.url)
            await asyncio.sleep(self._interval)

    def close(self) -> None:
        """Close idle connections."""
        for server in self.servers:
            server.close()
