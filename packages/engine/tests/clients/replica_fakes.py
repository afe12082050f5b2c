"""An engine's process whose calls end as the test decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.errors import EngineDead
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients.base import OutputSink


class FakeProcess:
    """An engine's process, as its client shows it; the test decides how calls end."""

    pid, max_model_len, step_seconds, memory_plan, heartbeat_age = 1, 100, 0.0, "", 0.0

    def __init__(self, index: int) -> None:
        self.index = index
        self.has_started = False
        self.failure: BaseException | None = None
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.loras: dict[int, LoRARequest] = {}
        self.calls: list[tuple[str, list[Any]]] = []
        self.start_error: BaseException | None = None
        self.on_lora: Callable[[FakeProcess, LoRARequest], object] = lambda process, lora: True
        self.on_call: Callable[[str], object] = lambda method: []
        self.add_error: BaseException | None = None

    def start(self, sink: OutputSink) -> None:
        if self.start_error is not None:
            raise self.start_error
        self.sink, self.has_started = sink, True

    def end(self) -> None:
        """The process is killed."""
        self.failure = EngineDead("killed")
        self.sink.on_death(self.failure)

    def add(self, requests: Sequence[CoreRequest]) -> None:
        if self.add_error is not None:
            raise self.add_error
        self.added += [request.request_id for request in requests]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def add_lora(self, lora: LoRARequest) -> Future[bool]:
        found = self._answered(self.on_lora(self, lora))
        if found.exception() is None:
            self.loras[lora.lora_int_id] = lora
        return found

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        return self._answered(self.loras.pop(lora_int_id, None) is not None)

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        self.calls.append((method, list(args)))
        return self._answered(self.on_call(method))

    def _answered(self, result: object) -> Future[Any]:
        future = Future[Any]()
        if self.failure is not None:
            result = EngineDead(str(self.failure))
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
        return future

    def trouble(self, limit: float) -> str | None:
        return None

    def kill(self) -> None:
        pass

    def shutdown(self) -> None:
        self.has_started = False


def request(name: str, rank: int | None = None) -> CoreRequest:
    return CoreRequest(name, [1, 2], SamplingParams(), frozenset(), 1, 0.0, data_parallel_rank=rank)
