"""The way of a front end to a core, wherever the core runs."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.loop import OutputSink
from headrace_engine.messages import CoreOutputs
from headrace_engine.startup import StartupTimeline

__all__ = [
    "CONTROL_TIMEOUT", "PROFILE_TIMEOUT", "CoreClient", "OutputSink", "WeakSink", "dead_again", "no_answer",
]  # fmt: skip

CONTROL_TIMEOUT = 60.0
"""Longest wait for an answer to a control call (statistics, cache reset), in seconds."""
PROFILE_TIMEOUT = 600.0
"""Longest wait for a trace to be written, in seconds: they can be large."""


def no_answer(call: str, seconds: float) -> TimeoutError:
    """The error of a call of workers that has taken too long. Their answers come together, so that
    nobody knows which worker is late.

    Args:
        call: the call's kind and what it runs, ``collective_rpc: report`` for example.
        seconds: the time that it had.
    """
    return TimeoutError(f"{call}: no answer from the workers in {seconds:g} s; the call goes on")


class CoreClient(ABC):
    """A way to a core. Methods may be called from any thread and return at once.

    Outputs and the core's death reach the sink from a thread of the client's own.
    """

    timeline: StartupTimeline
    """Phases of the start; complete once :meth:`start` has returned."""
    max_model_len: int = 0
    """Longest context that the core serves, known once it has started; 0 = as configured."""
    step_seconds: float = 0.0
    """About what the largest step takes, known once the core has started; 0 = not measured."""
    memory_plan: str = ""
    """The core's use of memory, for people."""
    is_one_of_several: ClassVar[bool] = False
    """True if the core has other clients, too."""

    @abstractmethod
    def start(self, sink: OutputSink) -> None:
        """Build the core and wait until it is ready.

        Raises what building raised; in another process, an error of the same class where it is
        one of :mod:`headrace_core.errors`.
        """

    @property
    def in_process(self) -> bool:
        """True if the workers are in this process, so that calls may give them objects."""
        return False

    @abstractmethod
    def add(self, requests: Sequence[CoreRequest]) -> None:
        """Queue requests; the fate of each comes through the sink.

        Raises:
            EngineDead: the core stopped.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; unknown ids are ignored, and so is a dead core."""

    @abstractmethod
    def suspend(self, request_ids: Sequence[str]) -> None:
        """Compute nothing of requests until :meth:`resume`; unknown ids are ignored, and so is a dead
        core. Outputs of steps in flight still come."""

    @abstractmethod
    def resume(self, request_ids: Sequence[str]) -> None:
        """Go on with suspended requests; other ids are ignored, and so is a dead core."""

    @abstractmethod
    def stats(self, drain: bool = False) -> Future[EngineStats]:
        """Counters and gauges; see :class:`~headrace_core.engine.EngineStats`."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        """Forget cached blocks; resolves to False while requests hold some and may not be reset."""

    @abstractmethod
    def add_lora(self, request: LoRARequest) -> Future[bool]:
        """Have an adapter read; see :meth:`headrace_core.engine.EngineClient.add_lora`."""

    @abstractmethod
    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        """Take no further requests with an adapter; see
        :meth:`headrace_core.engine.EngineClient.remove_lora`."""

    @abstractmethod
    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        """Adapters that are known, by id."""

    @abstractmethod
    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """Run a method of :data:`~headrace_engine.core.WORKER_CALLS` on every worker; results are
        plain data, by rank."""

    def apply_model(self, function: Callable[[Any], Any]) -> Future[list[Any]]:
        """Run a function on every worker's model; results by rank.

        Raises:
            UnsupportedFeature: the workers are in another process, and nothing that runs is sent there.
        """
        raise _stays_here("apply_model", "func")

    def run_on_workers(
        self, function: Callable[..., Any], args: Sequence[Any] = ()
    ) -> Future[list[Any]]:
        """Run a function with each worker, and then ``args``, as its arguments; results by rank.

        Raises:
            UnsupportedFeature: as :meth:`apply_model`.
        """
        raise _stays_here("collective_rpc", "method")

    def check_caller(self) -> None:
        """Check that the calling thread may wait for the core.

        Raises:
            EngineError: the thread is the core's own: it runs a function of :meth:`apply_model` or
                :meth:`run_on_workers`. Every method that would wait raises it.
        """
        return  # where no function runs, no thread of the core's calls

    @property
    def num_engines(self) -> int | None:
        """Engines that the core consists of now; None: as many as configured."""
        return None

    def scale(self, num_engines: int, drain_timeout: float) -> Future[int]:
        """Have so many engines; see :meth:`headrace_core.engine.EngineClient.scale_elastic_ep`.

        Raises:
            UnsupportedFeature: the number of engines is fixed.
        """
        raise UnsupportedFeature(
            "scale_elastic_ep: the number of engines is fixed here; start with --enable-elastic-ep, or with "
            "--data-parallel-size above 1 and without --enable-expert-parallel",
            param="new_data_parallel_size",
        )

    @property
    @abstractmethod
    def heartbeat_age(self) -> float:
        """Seconds since the loop last came round; 0 while idle."""

    def trouble(self, limit: float) -> str | None:
        """What is wrong with a core that has not failed; None: nothing.

        Args:
            limit: seconds without a round of the loop after which it counts as stuck.
        """
        age = self.heartbeat_age
        if age <= limit:
            return None
        return f"the engine has made no progress for {age:.1f} s (limit {limit:g} s)"

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error that stopped the core, or None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the core and free everything. Idempotent; waits."""


def _stays_here(call: str, param: str) -> UnsupportedFeature:
    """The refusal of a function: reading one from a socket would run whatever was sent."""
    return UnsupportedFeature(
        f"{call}: the engine runs in a process of its own, and functions are not sent there; start it "
        "in this process (engine_process=False), or call a worker method by its name",
        param=param,
    )


class WeakSink:
    """Passes a core's outputs on as long as somebody holds the engine: the core's thread must not
    keep an engine alive that everybody else has forgotten."""

    def __init__(self, sink: OutputSink) -> None:
        self._sink = weakref.ref(sink)

    def on_outputs(self, outputs: CoreOutputs) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_outputs(outputs)

    def on_death(self, error: BaseException) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_death(error)


def dead_again(error: BaseException) -> EngineDead:
    """A new exception for each consumer: one object's traceback must not be shared."""
    dead = EngineDead(str(error))
    dead.__cause__ = error
    return dead
