"""Executors run workers; a worker computes steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from headrace_core.errors import UnsupportedFeature
from headrace_core.kv import CacheSpec, KVCacheConfig
from headrace_core.step import ScheduledStep, StepResult


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory use of one worker, in bytes."""

    weights: int
    activations: int
    """Peak of a step with ``max_num_batched_tokens`` tokens, beyond the weights."""
    available: int
    """Free before anything of this engine was loaded."""
    step_seconds: float = 0.0
    """About what such a step takes; 0 = not measured."""


class Worker(Protocol):
    """Owns one device's shard of the model and its cache. Called from one thread only."""

    def load(self) -> None:
        """Build the model and read its weights."""

    def kv_specs(self) -> dict[str, CacheSpec]:
        """By name of the layer: those of attention that cache something, in execution order, then
        recurrent ones."""

    def profile(self) -> MemoryProfile:
        """Measure the largest step without a cache, or smaller ones that tell what it takes."""

    def allocate_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and bind it to the layers."""

    def warm_up(self) -> None:
        """Run what the first real step would otherwise wait for."""

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run one step. Whoever calls this finishes the result (:meth:`StepResult.finish`)."""

    def when_launching(self, call: Callable[[], None]) -> None:
        """From now on call this in every step just before the model runs, or when other threads have
        begun to run it; in the worker's thread.

        That is when results of the step before are best passed on: whoever takes them runs beside
        the model then, and does not take the interpreter from a worker that prepares a step.
        """

    def report(self) -> dict[str, Any]:
        """Facts about this worker, as plain data: ``rank``, ``pid``, ``device``, ``dtype`` ..."""

    def apply_model(self, function: Callable[[Any], Any]) -> Any:
        """Result of a function of the built model. Only called from the same process."""

    def start_profile(self) -> None:
        """Record the coming steps.

        Raises:
            UnsupportedFeature: no profiler is configured.
            RequestError: it records already.
        """

    def stop_profile(self) -> None:
        """End the recording and write it; nothing recorded: nothing happens.

        Raises:
            UnsupportedFeature: no profiler is configured.
        """

    def update_config(self, changes: object) -> None:
        """Change what :meth:`reload_weights` reads: ``{"load_config": {"load_format": "auto"}}``.

        Raises:
            RequestError: something else is to change.
        """

    def reload_weights(self) -> None:
        """Read the weights again, while no request runs.

        Raises:
            UnsupportedFeature: this worker cannot.
        """

    def close(self) -> None:
        """Free everything."""


WorkerFactory = Callable[[], Worker]


class Executor(ABC):
    """Runs one worker per rank. The object behind ``headrace.executors`` is a subclass.

    Steps are executed in the order in which they are submitted. A failed step fails its future
    with the worker's exception; the executor stays usable unless :attr:`failure` says otherwise.
    """

    def __init__(self, worker_factory: WorkerFactory) -> None:
        self.worker_factory = worker_factory

    @abstractmethod
    def start(self) -> None:
        """Create the workers. Raises what their creation raises."""

    @abstractmethod
    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run a worker method on every rank and wait: results by rank.

        Args:
            method: its name, or a function that gets the worker before ``args``; an executor whose
                workers are in other processes refuses functions (:class:`UnsupportedFeature`).
        """

    def call_beside(self, method: str, *args: Any) -> Future[list[Any]]:
        """Run a method of every rank that is made for it in another thread than steps, which go on; at a
        lower priority where the system has some. Returns at once: results by rank.

        Raises:
            UnsupportedFeature: the executor, or its workers, cannot.
        """
        raise UnsupportedFeature(f"{method}: executor {type(self).__name__} cannot do this")

    @abstractmethod
    def submit(self, step: ScheduledStep) -> Future[StepResult]:
        """Queue a step; returns at once."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """Why no more steps can run, or None."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and free what they hold. Idempotent; pending futures are cancelled."""
