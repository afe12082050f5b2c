"""State that the routes of one application share. One object per app, no globals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI, Request

from headrace_core.engine import EngineClient
from headrace_core.lora import LoRARequest
from headrace_server.api_processes.peers import Peers
from headrace_server.http.h11_protocol import Connections
from headrace_server.http.scaling_gate import Scaling
from headrace_server.observability.fingerprint import Fingerprint, fingerprint_of
from headrace_server.observability.metrics import HttpTraffic, Metrics
from headrace_server.observability.tracing import Tracing
from headrace_server.parsing.registry import Parsers
from headrace_server.settings import ServerSettings
from headrace_server.streaming.offload import OffLoop

if TYPE_CHECKING:
    from headrace_server.lora.served import ServedAdapters

logger = logging.getLogger(__name__)

_SETTLE = 0.05


@dataclass(eq=False)
class RequestInFlight:
    """One request in flight."""

    request_id: str
    stop: Callable[[], None]
    """End it early: its client gets an error saying that the server stops."""


class Lifecycle:
    """Serving, draining, stopping: who is in flight, and how they are told.

    Args:
        whole: of the server, where this one is a part of it: what is in flight here is in flight
            there, too, and what drains or stops there does so here.
    """

    def __init__(self, whole: Lifecycle | None = None) -> None:
        self._whole = whole
        self._draining = False
        self._stopping = False
        self.engine_died = asyncio.Event()
        self._work: set[RequestInFlight] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """True if new work is refused."""
        return self._draining or (self._whole is not None and self._whole.draining)

    @draining.setter
    def draining(self, value: bool) -> None:
        self._draining = value

    @property
    def stopping(self) -> bool:
        """True if what runs is ended early."""
        return self._stopping or (self._whole is not None and self._whole.stopping)

    @property
    def num_in_flight(self) -> int:
        return len(self._work)

    @contextmanager
    def track(self, request_id: str, stop: Callable[[], None]) -> Iterator[None]:
        """Count a request for the time of the block; ``stop`` may be called once meanwhile."""
        work = RequestInFlight(request_id, stop)
        self._enter(work)
        try:
            yield
        finally:
            self._leave(work)

    def _enter(self, work: RequestInFlight) -> None:
        self._work.add(work)
        self._idle.clear()
        if self._whole is not None:
            self._whole._enter(work)

    def _leave(self, work: RequestInFlight) -> None:
        self._work.discard(work)
        if not self._work:
            self._idle.set()
        if self._whole is not None:
            self._whole._leave(work)

    def begin_drain(self) -> None:
        """Refuse new work from now on."""
        if not self._draining:
            self._draining = True
            logger.info("draining: %d requests in flight", len(self._work))

    async def wait_idle(self, seconds: float) -> bool:
        """True once nothing is in flight, False after so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while self._work:
                    await self._idle.wait()
                    # Between its first output and its stream a request is not counted.
                    await asyncio.sleep(_SETTLE)
        except TimeoutError:
            return False
        return True

    def stop_all(self) -> None:
        """End everything in flight, each with an error."""
        self._draining = self._stopping = True
        if self._work:
            logger.warning("ending %d requests early", len(self._work))
        for work in list(self._work):
            work.stop()


class LoggedOnce:
    """Warnings about parts of requests that have no effect: each name is logged once, within bounds.

    Args:
        message: of the warning, with a place (``%r``) for the name.
        limit: most names that are kept.
    """

    def __init__(self, message: str, limit: int = 1000) -> None:
        self._message = message
        self._seen: set[str] = set()
        self._limit = limit

    def note(self, name: str) -> None:
        name = name[:128]
        if name not in self._seen and len(self._seen) < self._limit:
            self._seen.add(name)
            logger.warning(self._message, name)


class ServedEngine(Protocol):
    """Methods of an engine, or of all of them, that running a server needs."""

    @property
    def dead_error(self) -> BaseException | None: ...
    async def check_health(self) -> None: ...
    async def shutdown(self) -> None: ...


@dataclass(kw_only=True)
class Serving:
    """State that the routes and the middleware of one port share, ``app.state.headrace``."""

    engine: ServedEngine
    settings: ServerSettings
    traffic: HttpTraffic
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    paths: set[str] = field(default_factory=set)
    """Paths of all routers' routes."""
    created: int = field(default_factory=lambda: int(time.time()))
    load: int = 0
    """Inference requests in flight, for ``GET /load``."""
    admin: FastAPI | None = None
    """The application of the admin port, if there is one."""
    tracing: Tracing | None = None
    startup: Mapping[str, Any] | None = None
    """Times of the start, by phases, for ``GET /v1/system/startup``; None: it was not timed."""
    connections: Connections = field(default_factory=Connections)
    """Open connections of the public port, and their limits."""
    peers: Peers | None = None
    """The server's other HTTP processes, if it has some."""
    off_loop: OffLoop = field(default_factory=OffLoop)
    """Where large work is done."""


@dataclass(kw_only=True)
class ServerState(Serving):
    """Everything that a route of one model may need, ``request.app.state.headrace``."""

    engine: EngineClient
    metrics: Metrics
    chat_template: str | None = None
    """Text of the operator's template, replacing the model's."""
    parsers: Parsers = field(default_factory=Parsers)
    unknown_fields: LoggedOnce = field(
        default_factory=lambda: LoggedOnce(
            "request field %r is unknown: it has no effect, unless the chat template reads it"
        )
    )
    scaling: Scaling = field(default_factory=Scaling)
    """The change of the number of engines that is under way."""
    adapters: ServedAdapters | None = None
    """Names of adapters; None: the engine takes none."""
    adapter: LoRARequest | None = None
    """The one that :attr:`engine` computes everything with, in the state of requests that name it."""
    left_out: LoggedOnce = field(
        default_factory=lambda: LoggedOnce(
            "requests have %r, which only the vendor of the API can read: it is left out of the prompt"
        )
    )
    """Tools and parts of conversations that are skipped."""

    fingerprint: Fingerprint = field(init=False)
    """The name of all that decides the answers. Made at start: it takes some 20 ms."""

    def __post_init__(self) -> None:
        self.fingerprint = fingerprint_of(self.engine, self.settings, self.chat_template)


def serving_of(request: Request) -> Serving:
    """State that the port's routes share, whichever model they are for."""
    state = request.app.state.headrace
    assert isinstance(state, Serving)
    return state


def state_of(request: Request) -> ServerState:
    """The application's shared state."""
    state = request.app.state.headrace
    assert isinstance(state, ServerState)
    return state


async def state_for(request: Request, model: str | None) -> ServerState:
    """The state by which a request is answered: that of the adapter which it names, else the model's own.

    Where the engine takes no adapters, :func:`~headrace_server.requests.convert.check_model` refuses
    unknown names.

    Args:
        model: as the client gave it.

    Raises:
        UnknownModel: no such adapter, where the engine takes some.
        RequestError: a resolver's adapter cannot be used.
    """
    state = state_of(request)
    if state.adapters is None or model is None or model in state.engine.model.names:
        return state
    return (await state.adapters.find(model)).state
