"""One HTTP process of several: ``python -m headrace.http_processes.process``."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from headrace.assembly import connect, starting
from headrace.assembly.inspection import start_block
from headrace.cli.main import report_error
from headrace.cli.serve import ServeOptions, prepare
from headrace.environment import leave_warnings_to_another
from headrace.http_processes.hello import CoreEnded, EngineStarted, Hello
from headrace.logs import RESOLUTION, flush, leave_to_another
from headrace_core.errors import HeadraceError
from headrace_engine.clients.joined import JoinedClient
from headrace_engine.log_lines import log_block

logger = logging.getLogger("headrace")

EXIT_ORPHANED = 70
ORPHAN_SECONDS = 10.0
"""Seconds that a process without a supervisor has to tell its clients."""

TOLD_SECONDS = 30.0
"""Seconds that the supervisor may take to tell of a start that has ended."""


def main() -> int:
    """Serve until told to stop; returns the exit status."""
    # Past sys.stdin: a thread that waits in it would be in the way of the interpreter's end.
    supervisor = FileIO(0, closefd=False)
    hello = msgspec.json.decode(supervisor.readline(), type=Hello)
    leave_warnings_to_another()
    try:
        prepared = prepare(hello.argv, process=f"http {hello.rank}")
        leave_to_another(*RESOLUTION, "headrace_engine.startup")
        return _serve(hello, prepared, supervisor)
    except HeadraceError as error:
        return report_error("serve", error)


class SharedListener(socket.socket):
    """A socket that listens already, for others, too: nobody changes how long its queue is."""

    def listen(self, backlog: int = 0) -> None:
        """Nothing to do."""


def _serve(hello: Hello, prepared: ServeOptions, supervisor: FileIO) -> int:
    folder = Path(hello.folder)
    with contextlib.ExitStack() as stack:
        with starting(whole_process=True) as timeline:
            with timeline.phase("import server"):
                from headrace_server.api_processes.peers import Peers
                from headrace_server.app import create_app
                from headrace_server.run import run
            listening = stack.enter_context(SharedListener(fileno=hello.listening))
            admin = None
            if hello.admin is not None:
                admin = stack.enter_context(SharedListener(fileno=hello.admin))
            client = JoinedClient(folder, hello.name, timeline)
            news = EngineNews(client)
            threading.Thread(
                target=news.hear, args=(supervisor,), name="headrace-supervisor", daemon=True
            ).start()
            config = prepared.share_of_config()
            engine = connect(config, prepared.templates, timeline, client)
            peers = Peers(folder, hello.rank, prepared.settings.api_server_count)
            with timeline.phase("build routes"):
                app = create_app(engine, prepared.settings, peers)
        if hello.rank == 0:
            paths = sorted(app.state.headrace.paths)
            log_block(logger, "the model, as served here", start_block(engine.model, paths))
        logger.debug("start-up of HTTP process %d took:\n%s", hello.rank, timeline.describe())
        app.state.headrace.startup = {**timeline.facts(), "engine": news.startup()}

        def started() -> None:
            flush()  # the supervisor's line with the address is to be the last of the start
            os.write(hello.ready, b".")
            os.close(hello.ready)

        return run(app, listening, prepared.settings, admin, started)


class EngineNews:
    """News of the engine from the supervisor.

    Args:
        client: is told of the engine's end.
    """

    def __init__(self, client: JoinedClient) -> None:
        self._client = client
        self._startup: Mapping[str, Any] | None = None
        self._has_come = threading.Event()

    def startup(self) -> Mapping[str, Any] | None:
        """The engine's start by phases, which the supervisor tells once the engine serves; None: the
        engine or the supervisor ended first, or said nothing for :data:`TOLD_SECONDS`."""
        self._has_come.wait(TOLD_SECONDS)
        return self._startup

    def hear(self, supervisor: FileIO) -> None:
        """Take the supervisor's lines, to their end, which is the engine's end, too."""
        for line in supervisor:
            report_error = msgspec.json.decode(line, type=EngineStarted | CoreEnded)
            if isinstance(report_error, EngineStarted):
                self._startup = report_error.startup
            else:
                self._client.core_ended(report_error.how)
            self._has_come.set()
        self._has_come.set()
        self._client.core_ended("its supervisor has ended")
        # Clients hear of it and this process leaves, as with any engine that died; if not:
        threading.Event().wait(ORPHAN_SECONDS)
        os._exit(EXIT_ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
