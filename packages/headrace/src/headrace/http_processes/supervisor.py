"""The process that watches: one engine, and the HTTP processes that share its port."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from headrace.assembly import shared_core, starting
from headrace.cli.serve import ServeOptions, try_server
from headrace.http_processes.hello import CoreEnded, EngineStarted, Hello
from headrace_core.errors import EngineDead
from headrace_engine.clients.process import ProcessClient, describe_status
from headrace_engine.log_lines import log_block
from headrace_engine.messages import CoreOutputs

logger = logging.getLogger("headrace")

LOOK_SECONDS = 0.1
"""Between looks at the processes."""
MOST_RESTARTS, RESTART_WINDOW = 5, 60.0
"""So many processes may fall in so many seconds; at the next one the server gives up."""
KILLED_SECONDS = 10.0
"""Seconds that the system has to end a killed process."""
LATE_SECONDS = 30.0
"""Beyond the drain timeout, until a process that does not leave is killed."""


def serve(argv: Sequence[str], prepared: ServeOptions) -> int:
    """Run the server; returns its exit status.

    Args:
        argv: the command line, for the HTTP processes.
        prepared: what came of it here.

    Raises:
        AddressError: the port is taken.
        HeadraceError: whatever kept the engine from starting.
    """
    settings = prepared.settings
    with contextlib.ExitStack() as stack:
        with starting(whole_process=True) as timeline:
            try_server(settings, timeline)
            from headrace_server.run import address, bind, bind_admin

            listening = stack.enter_context(contextlib.closing(bind(settings)))
            admin = bind_admin(settings)
            if admin is not None:
                stack.enter_context(contextlib.closing(admin))
            folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            core = shared_core(prepared.config, timeline, folder)
            sockets = Sockets(listening, admin, folder, address(listening, settings))
            supervisor = Supervisor(argv, prepared, sockets, core)
            stack.callback(supervisor.end)
            supervisor.start()
        supervisor.tell_start(timeline.facts())
        log_block(logger, "start-up of the engine took", timeline.describe(), timeline.summary())
        return supervisor.run()


@dataclasses.dataclass(frozen=True)
class Sockets:
    """Sockets that all HTTP processes share."""

    listening: socket.socket
    admin: socket.socket | None
    folder: Path
    url: str = ""
    """Address at which requests are taken, for the log."""


class HttpProcess:
    """One HTTP process, started.

    Args:
        rank: its place, from 0.
        name: what the core calls it.
    """

    def __init__(self, rank: int, name: str, argv: Sequence[str], sockets: Sockets) -> None:
        self.rank, self.name = rank, name
        self.is_ready = False
        listening, admin = sockets.listening.fileno(), sockets.admin
        self._ready, ready = os.pipe()
        os.set_blocking(self._ready, False)
        passed = [listening, ready, *([] if admin is None else [admin.fileno()])]
        hello = Hello(list(argv), rank, name, str(sockets.folder), listening,
                      None if admin is None else admin.fileno(), ready)  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace.http_processes.process"],
            stdin=subprocess.PIPE, bufsize=0, pass_fds=passed,
            process_group=0,  # a terminal's Ctrl-C is the supervisor's to pass on, once
        )  # fmt: skip
        os.close(ready)
        self.say(hello)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.poll()

    def say(self, line: msgspec.Struct) -> None:
        """Tell it something; one that has ended hears nothing."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(line) + b"\n")

    def look(self) -> bool:
        """True if it has just begun to serve."""
        if self.is_ready:
            return False
        with contextlib.suppress(BlockingIOError):
            self.is_ready = bool(os.read(self._ready, 1))
        return self.is_ready

    def send(self, number: int) -> None:
        """Send a signal; one that has ended gets none."""
        self._process.send_signal(number)

    def forget(self) -> None:
        """Kill it if it still runs, and free what it held here."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(KILLED_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        os.close(self._ready)


class Supervisor:
    """Starts the processes, watches them, ends them.

    A falling HTTP process takes its own connections with it and nothing else: the core drops what
    it had asked for, and another one takes its place. The engine's end is everybody's.
    """

    def __init__(
        self, argv: Sequence[str], prepared: ServeOptions, sockets: Sockets, core: ProcessClient
    ) -> None:
        self._words, self._sockets, self._core = argv, sockets, core
        self._count = prepared.settings.api_server_count
        self._patience = prepared.settings.drain_timeout + LATE_SECONDS
        self._names = (f"http-{number}" for number in itertools.count())
        self._processes: dict[int, HttpProcess] = {}
        self._signals = 0
        self._passed_on = 0
        self._leaving_since: float | None = None
        self._restarts: list[float] = []
        self._status = 0
        self._core_is_dead = False
        self._told_address = False
        self._engine_started: EngineStarted | None = None

    def start(self) -> None:
        """Start everything; returns when the engine is ready.

        Raises:
            HeadraceError: whatever kept the engine from starting.
        """
        for rank in range(self._count):  # they import and read the tokenizer meanwhile
            self._spawn(rank)
        self._core.start(_Nobody())
        for process in self._processes.values():
            self._core.add_front_end(process.name)

    def tell_start(self, startup: dict[str, Any]) -> None:
        """Tell all processes, and those that come, how the engine's start went.

        Args:
            startup: its phases (:meth:`headrace_engine.startup.StartupTimeline.facts`).
        """
        self._engine_started = EngineStarted(startup)
        for process in self._processes.values():
            process.say(self._engine_started)

    def run(self) -> int:
        """Watch until everybody has left; returns the server's exit status."""
        with self._hearing_signals():
            while self._processes:
                self._pass_signals_on()
                self._look_at_core()
                for process in list(self._processes.values()):
                    self._look_at(process)
                if self._leaving_since is not None:
                    self._hurry()
                threading.Event().wait(LOOK_SECONDS)
        return self._status

    def end(self) -> None:
        """End what is left, the engine last."""
        for process in self._processes.values():
            process.forget()
        self._processes.clear()
        self._core.shutdown()

    def _spawn(self, rank: int) -> HttpProcess:
        process = HttpProcess(rank, next(self._names), self._words, self._sockets)
        self._processes[rank] = process
        if self._engine_started is not None:
            process.say(self._engine_started)
        return process

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        def count(number: int, frame: FrameType | None) -> None:
            self._signals += 1

        before = {s: signal.signal(s, count) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_signals_on(self) -> None:
        """The first drains, the second hurries: each process knows what to do."""
        while self._passed_on < self._signals:
            self._passed_on += 1
            self._leave()

    def _leave(self) -> None:
        self._leaving_since = self._leaving_since or time.monotonic()
        for process in self._processes.values():
            process.send(signal.SIGTERM)

    def _look_at_core(self) -> None:
        failure = self._core.failure
        if failure is None or self._core_is_dead:
            return
        self._core_is_dead = True
        self._status = 1
        for process in self._processes.values():
            process.say(CoreEnded(str(failure)))

    def _look_at(self, process: HttpProcess) -> None:
        if process.look() and all(p.is_ready for p in self._processes.values()):
            pids = ", ".join(str(p.pid) for p in self._processes.values())
            logger.info("%d HTTP processes serve: %s", len(self._processes), pids)
            if not self._told_address:  # the last line of the start
                self._told_address = True
                logger.info("serving at %s", self._sockets.url)
        status = process.status
        if status is None:
            return
        del self._processes[process.rank]
        process.forget()
        self._core.remove_front_end(process.name)
        if self._leaving_since is not None or self._core_is_dead:
            # One that was still starting ends by the signal itself: it has done as it was told.
            obeyed = self._leaving_since is not None and status == -signal.SIGTERM
            self._status = self._status or (0 if obeyed else _exit_status(status))
        else:
            self._replace(process, status)

    def _replace(self, process: HttpProcess, status: int) -> None:
        """Start another one in the place of one that fell, unless too many do."""
        how = f"HTTP process {process.rank} ended ({describe_status(status)})"
        now = time.monotonic()
        self._restarts = [t for t in self._restarts if now - t < RESTART_WINDOW] + [now]
        if not process.is_ready or len(self._restarts) > MOST_RESTARTS:
            logger.critical("%s; the server stops", how)
            self._status = _exit_status(status) or 1
            self._leave()
            return
        logger.error("%s; another one takes its place", how)
        with contextlib.suppress(EngineDead):  # the next look finds that out
            self._core.add_front_end(self._spawn(process.rank).name)

    def _hurry(self) -> None:
        """Kill those that do not leave."""
        assert self._leaving_since is not None
        if time.monotonic() - self._leaving_since < self._patience:
            return
        for process in self._processes.values():
            logger.error("HTTP process %d does not leave; it is killed", process.rank)
            process.send(signal.SIGKILL)


def _exit_status(status: int) -> int:
    """Exit status of the server for that of a process: 1 if a signal killed it."""
    return 1 if status < 0 else status


class _Nobody:
    """The supervisor asks nothing of the core, so it gets no outputs."""

    def on_outputs(self, outputs: CoreOutputs) -> None:
        logger.error("outputs without a receiver: %d", len(outputs.outputs))

    def on_death(self, error: BaseException) -> None:
        """:attr:`ProcessClient.failure` tells."""
