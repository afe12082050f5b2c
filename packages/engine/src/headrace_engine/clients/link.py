"""Talking to a core in another process: commands out, reports in, over ZeroMQ sockets in a folder.

Who started that process, and how its end is noticed, is the business of what inherits
:class:`CoreLink`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.clients.named_items import NamedItems
from headrace_engine.clients.wire import (
    HEARTBEAT_SECONDS,
    HIGH_WATER_MARK,
    PARENT,
    Abort,
    Add,
    AddLoRA,
    Attach,
    CallReply,
    CallWorkers,
    Command,
    Died,
    DoneReply,
    ErrorReply,
    Failed,
    FrameDecoder,
    GetStats,
    Heartbeat,
    ListLoRAs,
    LoRAsReply,
    Outputs,
    Ready,
    Recall,
    RecallReply,
    RemoveLoRA,
    Report,
    ResetPrefixCache,
    Resume,
    StatsReply,
    Suspend,
    as_exception,
    commands_address,
    reports_address,
)
from headrace_engine.shared_objects.items import SharedItems
from headrace_engine.shared_objects.named_items import NamedItem

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Time between two checks of a quiet connection that the core's process still lives."""
CONNECT_SECONDS = 30.0
"""Longest time until a core that has answered listens."""
JOIN_SECONDS = 15.0
"""Longest time until the reader's thread ends."""
START_SECONDS = 3600.0
"""Longest time of a start: reading weights from a slow disk takes a while."""


class CoreLink(CoreClient):
    """The front end's end of the sockets."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._call_ids = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._heartbeat = (0.0, 0.0)
        self._failure: BaseException | None = None
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._commands: zmq.Socket[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._items: SharedItems | None = None
        self._named: NamedItems | None = None

    def share_items(self, items: SharedItems) -> None:
        """Send media of requests through shared memory; before :meth:`start`."""
        self._items = items

    def share_names(self) -> NamedItems:
        """Have named media in common with the engine's other front ends; before :meth:`start`."""
        self._named = NamedItems(self._recall)
        return self._named

    def _recall(self, name: str) -> Future[NamedItem | None]:
        return self._call(lambda call_id: Recall(call_id, name))

    @abstractmethod
    def _ended(self) -> str | None:
        """The end of the core's process, in words; None while it lives, as far as is known."""

    @abstractmethod
    def _give_up(self) -> None:
        """The connection is broken: nobody listens to the core here any more."""

    def add(self, requests: Sequence[CoreRequest]) -> None:
        if not any(request.media for request in requests):
            self._send(Add(list(requests)))
            return
        named = [] if self._named is None else self._named.places(requests)
        left, items = (list(requests), []) if self._items is None else self._items.moved(requests)
        self._send(Add(left, items, named))

    def abort(self, request_ids: Sequence[str]) -> None:
        if self._failure is None and not self._stopping:
            self._send(Abort(list(request_ids)))

    def suspend(self, request_ids: Sequence[str]) -> None:
        if self._failure is None and not self._stopping:
            self._send(Suspend(list(request_ids)))

    def resume(self, request_ids: Sequence[str]) -> None:
        if self._failure is None and not self._stopping:
            self._send(Resume(list(request_ids)))

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        return self._call(lambda call_id: GetStats(call_id, drain))

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        return self._call(lambda call_id: ResetPrefixCache(call_id, reset_running_requests))

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        return self._call(lambda call_id: AddLoRA(call_id, request))

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        return self._call(lambda call_id: RemoveLoRA(call_id, lora_int_id))

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        return self._call(ListLoRAs)

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        return self._call(lambda call_id: CallWorkers(call_id, method, list(args)))

    @property
    def heartbeat_age(self) -> float:
        age, received = self._heartbeat
        silence = time.monotonic() - received
        # The core speaks at least every half second; before it is late, its word counts.
        return age + silence if silence > 2 * HEARTBEAT_SECONDS or age else 0.0

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    # What heirs build on.

    def _bind(self, folder: Path, name: str = PARENT) -> zmq.Socket[bytes]:
        """Bind both sockets in a folder; returns the one that the core reports on."""
        self._context = zmq.Context(io_threads=1)
        reports = self._bound(zmq.PULL, zmq.RCVHWM, reports_address(folder, name))
        self._commands = self._bound(zmq.PUSH, zmq.SNDHWM, commands_address(folder, name))
        return reports

    def _bound(self, kind: int, high_water_mark: int, address: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(high_water_mark, HIGH_WATER_MARK)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    def _wait_until_ready(self, reports: zmq.Socket[bytes]) -> Ready:
        """The core's first word.

        Raises:
            EngineDead: its process ended, or took too long.
        """
        decoder = FrameDecoder[Report](Report)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not reports.poll(int(POLL_SECONDS * 1000)):
                ended = self._ended()
                if ended is not None and not self._last_word(reports):
                    raise EngineDead(f"the engine process ended while starting ({ended})")
                continue
            report = decoder.decode(reports.recv())
            if isinstance(report, Ready):
                return report
            if isinstance(report, Failed):
                raise as_exception(report.error)
        raise EngineDead(f"the engine process was not ready after {START_SECONDS:g} s")

    def _last_word(self, reports: zmq.Socket[bytes]) -> bool:
        """True if a last report of a process that has ended was read; it may have been on its way."""
        return bool(reports.poll(int(POLL_SECONDS * 1000)))

    def _wait_until_heard(self) -> None:
        """The core's word may come before it has connected to where ours is said.

        Raises:
            EngineDead: it never does.
        """
        assert self._commands is not None
        if not self._commands.poll(int(CONNECT_SECONDS * 1000), zmq.POLLOUT):
            raise EngineDead("the engine process does not listen")

    def _listen(self, ready: Ready, reports: zmq.Socket[bytes], sink: OutputSink) -> None:
        """Note what the core said of itself, and read its reports from now on."""
        self.memory_plan = ready.memory_plan
        self.max_model_len = ready.max_model_len
        self.step_seconds = ready.step_seconds
        self._heartbeat = (0.0, time.monotonic())
        if self._items is not None:
            self._send(Attach(*self._items.handle(), self._items.max_object_size))
        self._reader = threading.Thread(
            target=self._read, args=(reports, sink), name="headrace-engine-reader", daemon=True
        )
        self._reader.start()

    def _disconnect(self) -> None:
        """Close the sockets, once the reader has ended. Idempotent."""
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(JOIN_SECONDS)
        with self._send_lock:
            commands, self._commands = self._commands, None
            if commands is not None:
                commands.close(linger=0)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)
        if self._items is not None:
            self._items.close()

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
        try:
            while True:
                if reports.poll(int(POLL_SECONDS * 1000)):
                    self._take(decoder.decode(reports.recv()), sink)
                elif (ended := self._ended()) is not None:
                    if self._stopping:
                        return
                    if not self._last_word(reports):
                        raise EngineDead(f"the engine process ended ({ended})")
        except BaseException as error:
            self._failure = error
            logger.critical("%s", error)
            sink.on_death(error)
        finally:
            self._fail_calls(self._failure or EngineDead("the engine is shut down"))
            if self._failure is not None:
                self._give_up()
            reports.close(linger=0)

    def _take(self, report: Report, sink: OutputSink) -> None:
        self._heartbeat = (0.0, time.monotonic())
        if isinstance(report, Outputs):
            sink.on_outputs(report.outputs)
        elif isinstance(report, Heartbeat):
            self._heartbeat = (report.age, time.monotonic())
        elif isinstance(report, StatsReply):
            self._settle(report.call_id, result=report.stats)
        elif isinstance(report, DoneReply):
            self._settle(report.call_id, result=report.done)
        elif isinstance(report, LoRAsReply):
            self._settle(report.call_id, result=report.loras)
        elif isinstance(report, CallReply):
            self._settle(report.call_id, result=report.results)
        elif isinstance(report, RecallReply):
            self._settle(report.call_id, result=report.item)
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
