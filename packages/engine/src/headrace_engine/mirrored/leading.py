"""Rank 0's side: an engine whose outputs other processes get, too."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.clients.wire import as_data
from headrace_engine.messages import CoreOutputs
from headrace_engine.mirrored.messages import (
    Added,
    Called,
    Died,
    Differs,
    Message,
    Outputs,
    Ready,
    describe_call,
    digest,
    pack,
    receive,
)
from headrace_engine.multiproc.frames import BadFrame, send
from headrace_engine.multiproc.nodes.joined import JoinedNode

logger = logging.getLogger(__name__)


class LeadingClient(CoreClient):
    """Passes everything on to a core's client, and tells the mirrors what it is asked and what comes out.

    Args:
        inner: the way to the core, which is in this process.
    """

    def __init__(self, inner: CoreClient) -> None:
        self.timeline = inner.timeline
        self._inner = inner
        self._mirrors: list[socket.socket] = []
        self._lock = threading.Lock()
        """Held while mirrors are told something: they all get it in one order."""
        self._sink: OutputSink | None = None
        self._failure: BaseException | None = None

    def take(self, nodes: Sequence[JoinedNode]) -> None:
        """Tell these from now on."""
        self._mirrors = [node.mirror for node in nodes if node.mirror is not None]

    @property
    def in_process(self) -> bool:
        return self._inner.in_process

    def start(self, sink: OutputSink) -> None:
        self._sink = sink
        self._inner.start(_Repeated(sink, self._tell))
        self.max_model_len, self.step_seconds = self._inner.max_model_len, self._inner.step_seconds
        self.memory_plan = self._inner.memory_plan
        for mirror in self._mirrors:
            threading.Thread(
                target=self._read, args=(mirror,), name="headrace-mirror", daemon=True
            ).start()
        self._tell(Ready(self.max_model_len, self.step_seconds, self.memory_plan))

    def add(self, requests: Sequence[CoreRequest]) -> None:
        self._check()
        with self._lock:
            self._send(Added([(request.request_id, digest(request)) for request in requests]))
            self._inner.add(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._inner.abort(request_ids)

    def suspend(self, request_ids: Sequence[str]) -> None:
        self._inner.suspend(request_ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        self._inner.resume(request_ids)

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        return self._inner.stats(drain)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        called = self._inner.reset_prefix_cache(reset_running_requests)
        return self._repeat("reset_prefix_cache", (reset_running_requests,), called)

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        return self._repeat("add_lora", (request.lora_int_id,), self._inner.add_lora(request))

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        return self._repeat("remove_lora", (lora_int_id,), self._inner.remove_lora(lora_int_id))

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        return self._inner.list_loras()

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        return self._repeat(method, args, self._inner.call_workers(method, args))

    def apply_model(self, function: Callable[[Any], Any]) -> Future[list[Any]]:
        return self._inner.apply_model(function)

    def run_on_workers(
        self, function: Callable[..., Any], args: Sequence[Any] = ()
    ) -> Future[list[Any]]:
        return self._inner.run_on_workers(function, args)

    def check_caller(self) -> None:
        self._inner.check_caller()

    @property
    def heartbeat_age(self) -> float:
        return self._inner.heartbeat_age

    @property
    def failure(self) -> BaseException | None:
        return self._failure or self._inner.failure

    def shutdown(self) -> None:
        self._inner.shutdown()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineDead(str(self._failure))

    def _repeat(self, method: str, args: Sequence[Any], called: Future[Any]) -> Future[Any]:
        """Tell the mirrors the result of a control call, once it is there."""
        call = describe_call(method, args)

        def tell(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                self._tell(Called(call, done.result()))
            else:
                self._tell(Called(call, error=as_data(error)))

        called.add_done_callback(tell)
        return called

    def _tell(self, message: Message) -> None:
        with self._lock:
            self._send(message)

    def _send(self, message: Message) -> None:
        pieces = pack(message)
        for mirror in self._mirrors:
            with contextlib.suppress(OSError):  # it has ended, which the executor sees
                send(mirror, pieces)

    def _read(self, mirror: socket.socket) -> None:
        """A mirror says nothing, unless its script does something else."""
        try:
            message = receive(mirror)
        except (EOFError, OSError, BadFrame):
            return
        if isinstance(message, Differs) and self._failure is None:
            logger.error("%s", message.reason)
            self._failure = EngineDead(message.reason)
            assert self._sink is not None
            self._sink.on_death(self._failure)


class _Repeated:
    """A sink whose outputs the mirrors get, too."""

    def __init__(self, sink: OutputSink, tell: Callable[[Message], None]) -> None:
        self._sink, self._tell = sink, tell

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self._tell(Outputs(outputs))
        self._sink.on_outputs(outputs)

    def on_death(self, error: BaseException) -> None:
        self._tell(Died(as_data(error)))
        self._sink.on_death(error)
