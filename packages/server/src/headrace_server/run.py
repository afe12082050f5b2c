"""Running the application: bind early, serve, drain, leave with the right exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from headrace_core.errors import AddressError, ConfigError
from headrace_server.api_processes.all_processes import adopt_pause, answers_of
from headrace_server.http.h11_protocol import Connections, protocol
from headrace_server.observability.access_log import careful_access_log, quiet_lifecycle_log
from headrace_server.security.tls import CertificateRefresher
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState, Serving

logger = logging.getLogger(__name__)

QUEUE = 2048
"""Connections that may wait to be accepted. Also how many asyncio accepts at once: of several
processes, which share a queue that is made already, none may take it all."""
WATCH_INTERVAL = 1.0
"""Seconds between looks at the engine's error state."""
LAST_WORDS = 2.0
"""Seconds for error events to reach their clients before connections are cut."""
KEEP_ALIVE_VARIABLE = "HEADRACE_HTTP_TIMEOUT_KEEP_ALIVE"
STAY_VARIABLE = "HEADRACE_KEEP_ALIVE_ON_ENGINE_DEATH"


def bind(settings: ServerSettings) -> socket.socket:
    """Take the address, before an engine is loaded: a clash fails at once.

    Raises:
        AddressError: the address is taken, or cannot be had.
    """
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    return _bind_tcp(settings.host, settings.port, "port")


def bind_admin(settings: ServerSettings) -> socket.socket | None:
    """:func:`bind` for the admin port; None if there is none."""
    if settings.admin_port is None:
        return None
    return _bind_tcp(settings.admin_host, settings.admin_port, "admin_port")


def _bind_tcp(host: str, port: int, field: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it a token waits for the acknowledgement of the one before,
    # which clients delay by some 40 ms.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(QUEUE)
    except OSError as error:
        sock.close()
        raise AddressError(
            f"{field} = {port}: {_url(host, port)} could not be taken: {error.strerror}",
            field=field,
        ) from error
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        sock.bind(path)
        sock.listen(QUEUE)
    except OSError as error:
        sock.close()
        raise AddressError(
            f"uds = {path!r}: could not be taken: {error.strerror or error}", field="uds"
        ) from error
    return sock


def _remove_stale(path: str) -> None:
    """Remove a socket file that nobody listens on; anything else stays and makes bind fail."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()


def run(
    app: FastAPI,
    sock: socket.socket,
    settings: ServerSettings,
    admin_sock: socket.socket | None = None,
    started: Callable[[], None] | None = None,
) -> int:
    """:func:`serve` in a new event loop. For engines that are not bound to one."""
    return asyncio.run(serve(app, sock, settings, admin_sock, started))


async def serve(
    app: FastAPI,
    sock: socket.socket,
    settings: ServerSettings,
    admin_sock: socket.socket | None = None,
    started: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal or the engine's death; shuts the engine down; returns the exit status.

    SIGTERM or SIGINT: not ready at once, new work is refused, running requests get
    ``drain_timeout`` seconds, then an error event; 0 is returned. A second signal skips the
    waiting. If the engine dies, running requests get an error event and 1 is returned. Signal
    handlers are installed in the main thread only and put back afterwards.

    Args:
        started: called once requests are taken, in place of logging the address: another process does.
    """
    state: Serving = app.state.headrace
    config = _config(app, settings, state.connections)
    config.load()
    server = _Server(config, address(sock, settings), started)
    watch = asyncio.create_task(_watch(state, server))
    refresher = None
    if settings.enable_ssl_refresh and config.ssl is not None:
        refresher = CertificateRefresher(config.ssl, settings)
        refresher.start()
    logger.debug("routes: %s", ", ".join(sorted(state.paths)))
    quiet_lifecycle = quiet_lifecycle_log(settings.uvicorn_log_level)
    try:
        with careful_access_log(settings.quiet_paths), quiet_lifecycle:
            async with _with_peers(state), _serving_admin(state, settings, admin_sock):
                if isinstance(state, ServerState) and state.adapters is not None:
                    await state.adapters.start()
                await server.serve(sockets=[sock])
    finally:
        if refresher is not None:
            refresher.stop()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await state.engine.shutdown()
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.shutdown)
        state.off_loop.close()
        if settings.uds is not None:
            Path(settings.uds).unlink(missing_ok=True)
    return 1 if state.lifecycle.engine_died.is_set() else 0


@contextlib.asynccontextmanager
async def _with_peers(state: Serving) -> AsyncIterator[None]:
    """Answer the server's other HTTP processes, if there are any."""
    if state.peers is None:
        yield
        return
    assert isinstance(state, ServerState), "HTTP processes share one engine"
    await adopt_pause(state, state.peers)
    async with state.peers.answering(answers_of(state)):
        yield


@contextlib.asynccontextmanager
async def _serving_admin(
    state: Serving, settings: ServerSettings, sock: socket.socket | None
) -> AsyncIterator[None]:
    """The admin port's server, as long as the public one's."""
    if state.admin is None:
        yield
        return
    sock = sock or bind_admin(settings)
    assert sock is not None, "an admin application without an admin port"
    server = _SideServer(
        _config(state.admin, settings, Connections(header_timeout=settings.header_timeout))
    )
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    host, port = sock.getsockname()[:2]
    logger.info("control routes at %s", _url(host, port, _scheme(settings)))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        sock.close()


def _scheme(settings: ServerSettings) -> str:
    return "https" if settings.ssl_certfile else "http"


def address(sock: socket.socket, settings: ServerSettings) -> str:
    """Where the server listens, as a URL; IPv6 hosts in brackets."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sock.getsockname()[:2]
    return _url(host, port, _scheme(settings)) + settings.root_path


def _url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _config(app: FastAPI, settings: ServerSettings, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(connections),
        ws="none",
        lifespan="on",
        backlog=QUEUE if settings.api_server_count == 1 else 1,
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=keep_alive_seconds(os.environ),
        h11_max_incomplete_event_size=settings.h11_max_incomplete_event_size,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
    )


def keep_alive_seconds(environ: Mapping[str, str]) -> int:
    """Seconds that an idle connection is kept (:data:`KEEP_ALIVE_VARIABLE`).

    Raises:
        ConfigError: the variable is not a whole number.
    """
    given = environ.get(KEEP_ALIVE_VARIABLE, "5")
    if not given.isascii() or not given.isdigit():
        raise ConfigError(
            f"{KEEP_ALIVE_VARIABLE} = {given!r}: must be a whole number of seconds",
            field=KEEP_ALIVE_VARIABLE,
        )
    return int(given)


def stays_when_dead(environ: Mapping[str, str]) -> bool:
    """True if the server goes on answering after its engine has died (:data:`STAY_VARIABLE`).

    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    given = environ.get(STAY_VARIABLE, "")
    if given not in ("", "0", "1"):
        raise ConfigError(f"{STAY_VARIABLE} = {given!r}: must be 0 or 1", field=STAY_VARIABLE)
    return given == "1"


class _LeavingServer(uvicorn.Server):
    """uvicorn, which tells the application of its end also where requests are cut: otherwise the
    application's task is cancelled with the event loop, and its stack goes to the log as an error."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See :meth:`uvicorn.Server.shutdown`."""
        await super().shutdown(sockets=sockets)
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), LAST_WORDS)


class _SideServer(_LeavingServer):
    """A server beside the main one, which takes the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server(_LeavingServer):
    """uvicorn, with our meaning of signals: the first drains, the second stops.

    Args:
        url: where it listens; logged once it takes requests, as the last line of a start.
        started: called instead of that; None: it is logged.
    """

    def __init__(
        self, config: uvicorn.Config, url: str, started: Callable[[], None] | None = None
    ) -> None:
        super().__init__(config)
        self._url = url
        self._say = started or self._log_address
        self.num_signals = 0
        self.signalled = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See :meth:`uvicorn.Server.startup`."""
        await super().startup(sockets=sockets)
        if self.started:
            self._say()

    def _log_address(self) -> None:
        logger.info("serving at %s", self._url)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self.interrupt)

    def interrupt(self) -> None:
        """Take a signal."""
        self.num_signals += 1
        self.signalled.set()


async def _watch(state: Serving, server: _Server) -> None:
    """Wait for the first of: a signal, a drain begun in code, the engine's death; then leave."""
    lifecycle = state.lifecycle
    stay = stays_when_dead(os.environ)
    while not server.signalled.is_set() and not lifecycle.draining:
        if state.engine.dead_error is not None and not stay:
            await _leave_dead(state, server)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(server.signalled.wait(), WATCH_INTERVAL)
    await _leave(state, server)


async def _leave_dead(state: Serving, server: _Server) -> None:
    logger.critical("the engine died: %s", state.engine.dead_error)
    state.lifecycle.engine_died.set()
    state.lifecycle.draining = True
    # Running requests hear of it from the engine itself; those that do not are told by us.
    if not await state.lifecycle.wait_idle(LAST_WORDS):
        state.lifecycle.stop_all()
        await state.lifecycle.wait_idle(LAST_WORDS)
    server.force_exit = server.should_exit = True


async def _leave(state: Serving, server: _Server) -> None:
    lifecycle = state.lifecycle
    lifecycle.begin_drain()
    drained = asyncio.create_task(lifecycle.wait_idle(state.settings.drain_timeout))
    again = asyncio.create_task(_second_signal(server))
    died = asyncio.create_task(_death(state))
    await asyncio.wait({drained, again, died}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, again, died):
        task.cancel()
    if lifecycle.num_in_flight:
        lifecycle.stop_all()
        if not await lifecycle.wait_idle(LAST_WORDS):
            server.force_exit = True
    server.should_exit = True
    # uvicorn waits for connections that a client keeps open without reading; not for ever.
    await asyncio.sleep(LAST_WORDS)
    server.force_exit = True


async def _second_signal(server: _Server) -> None:
    while server.num_signals < 2:
        server.signalled.clear()
        await server.signalled.wait()


async def _death(state: Serving) -> None:
    while state.engine.dead_error is None:
        await asyncio.sleep(WATCH_INTERVAL)
    state.lifecycle.engine_died.set()
