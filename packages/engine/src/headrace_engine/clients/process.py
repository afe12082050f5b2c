"""A core in a process of its own, behind ZeroMQ sockets in a private folder.

The child is told what to build by a dotted name and a configuration as JSON, so it holds nothing of
this process. Either side notices the other's end: the child by its standard input, this side by
waiting for the process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace_core.config import EngineConfig
from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead
from headrace_core.log_lines import writes_json
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.clients.child import HEARTBEAT_SECONDS, HIGH_WATER_MARK
from headrace_engine.clients.wire import (
    Abort,
    Add,
    CallReply,
    CallWorkers,
    Command,
    Died,
    ErrorReply,
    Failed,
    FrameDecoder,
    GetStats,
    Heartbeat,
    Hello,
    Outputs,
    Ready,
    Report,
    ResetPrefixCache,
    ResetReply,
    StatsReply,
    Stop,
    as_exception,
)
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often a quiet connection looks whether the child still lives."""
STOP_SECONDS = 15.0
"""How long a child may take to end before it is killed."""
START_SECONDS = 3600.0
"""How long a start may take: reading weights from a slow disk takes its time."""


class ProcessClient(CoreClient):
    """Runs a core in a child process.

    Args:
        factory: ``module:function``, called in the child with (config, timeline) to make the core.
        config: resolved; crosses as JSON.
        timeline: to continue one that has begun before; default: a new one.
    """

    def __init__(
        self, factory: str, config: EngineConfig, timeline: StartupTimeline | None = None
    ) -> None:
        self.timeline = timeline or StartupTimeline()
        self._factory = factory
        self._config = config
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._heartbeat = (0.0, 0.0)
        self._failure: BaseException | None = None
        self._stopping = False
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the child, None before :meth:`start`."""
        return self._process.pid if self._process is not None else None

    def start(self, sink: OutputSink) -> None:
        begin = time.monotonic()
        try:
            reports = self._spawn()
            ready = self._wait_until_ready(reports)
        except BaseException:
            self._clean_up()
            raise
        for phase in ready.phases:
            self.timeline.add(phase.name, phase.seconds, phase.part_of)
        spent = sum(phase.seconds for phase in ready.phases if phase.part_of is None)
        self.timeline.add("engine process", max(0.0, time.monotonic() - begin - spent))
        self.timeline.finish()
        self.memory_plan = ready.memory_plan
        self.max_model_len = ready.max_model_len
        self.step_seconds = ready.step_seconds
        self._heartbeat = (0.0, time.monotonic())
        self._reader = threading.Thread(
            target=self._read, args=(reports, sink), name="headrace-engine-reader", daemon=True
        )
        self._reader.start()

    def add(self, requests: Sequence[CoreRequest]) -> None:
        self._send(Add(list(requests)))

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._failure is None and not self._stopping:
            self._send(Abort(list(request_ids)))

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        return self._call(lambda call_id: GetStats(call_id, drain))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        return self._call(lambda call_id: ResetPrefixCache(call_id, reset_running_requests))

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        return self._call(lambda call_id: CallWorkers(call_id, method, list(args)))

    @property
    def heartbeat_age(self) -> float:
        age, received = self._heartbeat
        silence = time.monotonic() - received
        # The child speaks at least every half second; before it is late, its word counts.
        return age + silence if silence > 2 * HEARTBEAT_SECONDS or age else 0.0

    @property
    def failure(self) -> BaseException | None:
        return self._failure

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

    def _spawn(self) -> zmq.Socket[bytes]:
        """Start the child; returns the socket on which it reports."""
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        self._context = zmq.Context(io_threads=1)
        reports = self._bind(zmq.PULL, zmq.RCVHWM, "reports")
        self._commands = self._bind(zmq.PUSH, zmq.SNDHWM, "commands")
        hello = Hello(
            factory=self._factory,
            config=self._config,
            folder=str(self._folder),
            log_level=logger.getEffectiveLevel(),
            log_json=writes_json(__name__),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_engine.clients.child"],
            stdin=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ended already: waiting for it will say so
            self._process.stdin.write(msgspec.json.encode(hello) + b"\n")
        return reports

    def _bind(self, kind: int, high_water_mark: int, name: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(high_water_mark, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{self._folder}/{name}")
        return socket

    def _wait_until_ready(self, reports: zmq.Socket[bytes]) -> Ready:
        decoder = FrameDecoder[Report](Report)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not reports.poll(int(POLL_SECONDS * 1000)):
                self._raise_if_ended(reports)
                continue
            report = decoder.decode(reports.recv())
            if isinstance(report, Ready):
                return report
            if isinstance(report, Failed):
                raise as_exception(report.error)
        raise EngineDead(f"the engine process was not ready after {START_SECONDS:g} s")

    def _raise_if_ended(self, reports: zmq.Socket[bytes]) -> None:
        assert self._process is not None
        status = self._process.poll()
        if status is not None and not reports.poll(0):
            raise EngineDead(f"the engine process ended while starting ({_describe(status)})")

    def _call(self, command: Callable[[int], Command]) -> Future[Any]:
        call_id, future = next(self._call_ids), Future[Any]()
        self._calls[call_id] = future
        try:
            self._send(command(call_id))
        except EngineDead as error:
            self._calls.pop(call_id, None)
            future.set_exception(error)
        if self._failure is not None:
            self._fail_calls(self._failure)
        return future

    def _send(self, command: Command) -> None:
        if self._failure is not None:
            raise EngineDead(str(self._failure)) from self._failure
        frame = self._encoder.encode(command)
        with self._send_lock:
            if self._commands is None or self._stopping:
                raise EngineDead("the engine is shut down")
            try:
                self._commands.send(frame, zmq.NOBLOCK)
            except zmq.Again:
                raise EngineDead("the engine process takes no commands") from None

    # The reader's thread.

    def _read(self, reports: zmq.Socket[bytes], sink: OutputSink) -> None:
        decoder = FrameDecoder[Report](Report)
        assert self._process is not None
        try:
            while True:
                if reports.poll(int(POLL_SECONDS * 1000)):
                    self._take(decoder.decode(reports.recv()), sink)
                elif (status := self._process.poll()) is not None:
                    if not self._stopping:
                        raise EngineDead(f"the engine process ended ({_describe(status)})")
                    return
        except BaseException as error:
            self._failure = error
            logger.critical("%s", error)
            self._process.kill()  # if it still lives, nobody listens to it any more
            sink.on_death(error)
        finally:
            self._fail_calls(self._failure or EngineDead("the engine is shut down"))
            reports.close(linger=0)

    def _take(self, report: Report, sink: OutputSink) -> None:
        self._heartbeat = (0.0, time.monotonic())
        if isinstance(report, Outputs):
            sink.on_outputs(report.outputs)
        elif isinstance(report, Heartbeat):
            self._heartbeat = (report.age, time.monotonic())
        elif isinstance(report, StatsReply):
            self._settle(report.call_id, result=report.stats)
        elif isinstance(report, ResetReply):
            self._settle(report.call_id, result=report.done)
        elif isinstance(report, CallReply):
            self._settle(report.call_id, result=report.results)
        elif isinstance(report, ErrorReply):
            self._settle(report.call_id, error=as_exception(report.error))
        elif isinstance(report, Died):
            cause = as_exception(report.error)
            raise EngineDead(f"the engine process failed: {cause}") from cause

    def _settle(
        self, call_id: int, result: object = None, error: BaseException | None = None
    ) -> None:
        future = self._calls.pop(call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def _fail_calls(self, error: BaseException) -> None:
        for call_id in list(self._calls):
            self._settle(call_id, error=EngineDead(str(error)))

    # Clean-up.

    def _clean_up(self) -> None:
        """End the child, close the sockets, remove the folder. Idempotent."""
        if self._process is not None:
            self._end_process(self._process)
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(STOP_SECONDS)
        with self._send_lock:
            commands, self._commands = self._commands, None
            if commands is not None:
                commands.close(linger=0)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)
        if self._folder is not None:
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


def _describe(status: int) -> str:
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"
