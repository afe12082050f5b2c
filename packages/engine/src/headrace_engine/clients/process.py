"""A core in a process of its own, behind ZeroMQ sockets in a private folder.

The child is told what to build by a dotted name and a configuration as JSON, so it holds nothing of
this process. Either side notices the other's end: the child by its standard input, this side by
waiting for the process. Further processes can talk to the same core: see
:mod:`headrace_engine.clients.joined`.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from headrace_core.context import MODEL
from headrace_core.errors import EngineDead
from headrace_engine.clients.base import OutputSink
from headrace_engine.clients.link import CoreLink
from headrace_engine.clients.wire import Hello, Join, Leave, Stop
from headrace_engine.config import EngineConfig
from headrace_engine.lockstep.peers import EnginePlace
from headrace_engine.log_lines import writes_colours, writes_json
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)

STOP_SECONDS = 15.0
"""Longest time until a child ends, before it is killed."""
FAREWELL_SECONDS = 2.0
"""Longest time until a child that failed ends by itself."""


class ProcessClient(CoreLink):
    """Runs a core in a child process.

    Args:
        factory: ``module:function``, called in the child with (config, timeline) to make the core.
        config: resolved; crosses as JSON.
        timeline: to continue one that has begun before; default: a new one.
        folder: where the sockets are, if somebody else makes and removes it; None: a new one.
        place: the engine's, among those with which it shares experts; None: there are none.
    """

    def __init__(
        self,
        factory: str,
        config: EngineConfig,
        timeline: StartupTimeline | None = None,
        folder: Path | None = None,
        place: EnginePlace | None = None,
    ) -> None:
        super().__init__()
        self.timeline = timeline or StartupTimeline()
        self._factory = factory
        self._config = config
        self._folder = folder
        self._owns_folder = folder is None
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before :meth:`start`."""
        return self._process.pid if self._process is not None else None

    @property
    def has_started(self) -> bool:
        """True once :meth:`start` has returned."""
        return self._reader is not None

    @property
    def how_ended(self) -> str | None:
        """The end of the child in words; None: it lives, or was not started."""
        return None if self._process is None else self._ended()

    def kill(self) -> None:
        """End the child at once, if there is one; :meth:`start` in another thread raises then."""
        if self._process is not None:
            self._process.kill()

    def start(self, sink: OutputSink) -> None:
        begin = time.monotonic()
        try:
            reports = self._spawn()
            ready = self._wait_until_ready(reports)
        except BaseException:
            self._clean_up()
            self._stopping = True  # there is nobody to be told
            raise
        for phase in ready.phases:
            self.timeline.add(phase.name, phase.seconds, phase.part_of)
        spent = sum(phase.seconds for phase in ready.phases if phase.part_of is None)
        self.timeline.add("engine process", max(0.0, time.monotonic() - begin - spent))
        self.timeline.finish()
        self._listen(ready, reports, sink)

    def add_front_end(self, name: str) -> None:
        """Have the core serve a front end of that name, too.

        Raises:
            EngineDead: the core stopped.
        """
        self._send(Join(name))

    def remove_front_end(self, name: str) -> None:
        """A front end has gone: whatever it asked for is aborted. A dead core is ignored."""
        if self._failure is None and not self._stopping:
            self._send(Leave(name))

    def shutdown(self) -> None:
        if self._process is None:
            return
        if not self._stopping and self._failure is None:
            try:
                self._send(Stop())
            except EngineDead:
                logger.warning("the engine process takes no commands; it is killed")
                self._process.kill()
        self._stopping = True
        self._clean_up()

    def _ended(self) -> str | None:
        assert self._process is not None
        status = self._process.poll()
        return None if status is None else describe_status(status)

    def _give_up(self) -> None:
        """End the child, which may live; one that says that it dies may say so to everybody first."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL_SECONDS)
        self._process.kill()

    def _spawn(self) -> zmq.Socket[bytes]:
        """Start the child; returns the socket on which it reports."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        reports = self._bind(self._folder)
        hello = Hello(
            factory=self._factory,
            config=self._config,
            folder=str(self._folder),
            log_level=logger.getEffectiveLevel(),
            log_json=writes_json(__name__),
            log_colour=writes_colours(__name__),
            log_model=MODEL.get(),
            place=self._place,
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.clients.child"],
            stdin=subprocess.PIPE,
            bufsize=0,
            process_group=0,  # a terminal's Ctrl-C is this process's, also while the child imports
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended already: waiting for it will say so
            self._process.stdin.write(msgspec.json.encode(hello) + b"\n")
        return reports

    def _clean_up(self) -> None:
        """End the child, close the sockets, remove the folder. Idempotent."""
        if self._process is not None:
            self._end_process(self._process)
        self._disconnect()
        if self._folder is not None and self._owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _end_process(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for a child that was told to stop; one that was not, or that hangs, is killed."""
        if not self._stopping:
            process.kill()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the engine process did not end in %g s; it is killed", STOP_SECONDS)
            process.kill()
            process.wait(STOP_SECONDS)
        if process.stdin is not None:
            process.stdin.close()


def describe_status(status: int) -> str:
    """The end of a process, for people."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
