"""A core in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink
from headrace_engine.core import EngineCore
from headrace_engine.guests import Guests
from headrace_engine.loop import EngineLoop
from headrace_engine.startup import StartupTimeline


class InprocClient(CoreClient):
    """Builds a core and runs its loop in a thread.

    Args:
        build: makes the core; called by :meth:`start`, in the calling thread.
        timeline: to continue one that has begun before; default: a new one.
    """

    def __init__(
        self,
        build: Callable[[StartupTimeline], EngineCore],
        timeline: StartupTimeline | None = None,
    ) -> None:
        self.timeline = timeline or StartupTimeline()
        self._build = build
        self._loop: EngineLoop | None = None
        self._guests = Guests()

    @property
    def in_process(self) -> bool:
        return True

    def start(self, sink: OutputSink) -> None:
        core = self._build(self.timeline)
        self.memory_plan = core.memory_plan
        self.max_model_len = core.max_model_len
        self.step_seconds = core.step_seconds
        with contextlib.suppress(UnsupportedFeature):  # the workers are in other processes
            core.run_on_workers(self._guests.mark, [threading.get_ident()])
        self._loop = EngineLoop(core, sink)
        self._loop.start()
        # Whoever forgets to shut down: end the loop with this object, or with the interpreter.
        weakref.finalize(self, _end, self._loop, self._guests)
        self.timeline.finish()

    def add(self, requests: Sequence[CoreRequest]) -> None:
        self.check_caller()
        loop = self._running()
        if not loop.is_alive:
            raise loop.failure or EngineDead("the engine is shut down")
        loop.add(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._running().abort(request_ids)

    def suspend(self, request_ids: Sequence[str]) -> None:
        self._running().suspend(request_ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        self._running().resume(request_ids)

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        self.check_caller()
        return self._running().stats(drain)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        self.check_caller()
        return self._running().reset_prefix_cache(reset_running_requests)

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        self.check_caller()
        return self._running().add_lora(request)

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        self.check_caller()
        return self._running().remove_lora(lora_int_id)

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        self.check_caller()
        return self._running().list_loras()

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        self.check_caller()
        return self._running().call_workers(method, args)

    def apply_model(self, function: Callable[[Any], Any]) -> Future[list[Any]]:
        self.check_caller()
        return self._running().apply_model(self._guests.welcome("apply_model", function))

    def run_on_workers(
        self, function: Callable[..., Any], args: Sequence[Any] = ()
    ) -> Future[list[Any]]:
        self.check_caller()
        guest = self._guests.welcome("collective_rpc", function)
        return self._running().run_on_workers(guest, args)

    def check_caller(self) -> None:
        self._guests.refuse_calls()

    @property
    def heartbeat_age(self) -> float:
        return self._running().heartbeat_age

    @property
    def failure(self) -> BaseException | None:
        return self._loop.failure if self._loop is not None else None

    def shutdown(self) -> None:
        self.check_caller()
        if self._loop is not None:
            self._loop.stop()

    def _running(self) -> EngineLoop:
        if self._loop is None:
            raise EngineDead("the engine was never started")
        return self._loop


def _end(loop: EngineLoop, guests: Guests) -> None:
    """Stop the loop of a client that was dropped; a function that the loop waits for cannot wait for it."""
    loop.stop(wait=guests.inside is None)
