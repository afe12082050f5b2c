"""The engine's core: scheduler, cache and workers under one roof, and how it is put together.

The core knows token ids only. :mod:`headrace_engine.loop` drives it; nothing here waits for
anything but the start of the workers.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core import plugins
from headrace_core.engine import EngineStats
from headrace_core.errors import RequestError
from headrace_core.executor import Executor, MemoryProfile
from headrace_core.kv import CacheSpec
from headrace_core.request import CoreRequest
from headrace_core.step import ScheduledStep, StepResult
from headrace_engine.config import EngineConfig
from headrace_engine.guests import must_not_end
from headrace_engine.log_lines import log_block
from headrace_engine.messages import CoreOutput
from headrace_engine.startup import StartupTimeline
from headrace_engine.step_timer import StepTimer
from headrace_engine.structured.store import Compiled, GrammarStore

if TYPE_CHECKING:
    from headrace_engine.execution.memory import CachePlan

logger = logging.getLogger(__name__)

WORKER_CALLS = {
    "report": 0, "start_profile": 0, "stop_profile": 0, "update_config": 1, "reload_weights": 0,
}  # fmt: skip
"""Worker methods that may be called from outside, and how many arguments each takes. A list of what
may, never of what may not: a worker has methods that would end it."""


class StepScheduler(Protocol):
    """A scheduler, as the core needs it (``headrace.schedulers``)."""

    def add(self, request: CoreRequest) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> list[CoreOutput]: ...
    def schedule(self) -> ScheduledStep | None: ...
    def suspend(self, request_ids: Sequence[str]) -> None: ...
    def resume(self, request_ids: Sequence[str]) -> None: ...
    def take_refused(self) -> list[CoreOutput]: ...
    def update(self, step: ScheduledStep, result: StepResult) -> list[CoreOutput]: ...
    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def stats(self, *, drain: bool = False) -> EngineStats: ...


class EngineCore:
    """One model's scheduler and workers. Used from one thread."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        *,
        overlapped: bool = True,
        log_stats_interval: float = 0.0,
        memory_plan: str = "",
        block_size: int = 0,
        max_model_len: int = 0,
        step_seconds: float = 0.0,
        grammars: GrammarStore | None = None,
        step_timer: StepTimer | None = None,
    ) -> None:
        """
        Args:
            scheduler: owns the KV-cache manager.
            executor: started, with the cache allocated.
            overlapped: schedule the next step before the current one's result is there.
            log_stats_interval: seconds between log lines; 0 = none.
            memory_plan: where the memory went, for people.
            block_size: tokens per block, for the statistics.
            max_model_len: longest context that it serves; 0 = as configured.
            step_seconds: about what the largest step takes; 0 = not measured.
            grammars: the workers'; requests wait here until theirs is compiled.
            step_timer: has the loop time its steps; None: they are not.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.overlapped = overlapped
        self.log_stats_interval = log_stats_interval
        self.memory_plan = memory_plan
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.grammars = grammars
        self.step_timer = step_timer
        self._compiling: list[tuple[CoreRequest, Future[Compiled]]] = []

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        max_model_len: int,
        executor: Executor,
        timeline: StartupTimeline,
        fit_context: bool = False,
        grammars: GrammarStore | None = None,
    ) -> EngineCore:
        """Start the workers, plan and allocate the cache, warm up.

        Args:
            config: resolved (:func:`headrace.assembly.resolution.resolve`).
            max_model_len: longest context.
            executor: not yet started; shut down again if anything here fails.
            timeline: gets one phase per piece of work.
            fit_context: shorten ``max_model_len`` to what the cache can hold, instead of refusing.
            grammars: of structured output, shared with the workers of this process.

        Raises:
            CapacityError: the longest request would not fit into the cache.
            ModelError, WeightsError, ConfigError: from the workers.
        """
        try:
            core = cls._build(config, max_model_len, executor, timeline, fit_context)
            core.grammars = grammars
            return core
        except BaseException:
            executor.shutdown()
            raise

    @classmethod
    def _build(
        cls,
        config: EngineConfig,
        max_model_len: int,
        executor: Executor,
        timeline: StartupTimeline,
        fit_context: bool,
    ) -> EngineCore:
        with timeline.phase("import engine"):
            import headrace_engine.execution.memory  # noqa: F401 - timed here
            from headrace_engine.kv.factory import make_manager
        with timeline.phase("start workers"):
            executor.start()
        with timeline.phase("load model", is_long=True):
            executor.call("load")
        with timeline.phase("profile memory"):
            specs = executor.call("kv_specs")[0]
            profile = executor.call("profile")[0]
        with timeline.phase("allocate cache"):
            plan = _plan_memory(profile, specs, config, max_model_len, fit_context)
            max_model_len = plan.max_model_len
            log_block(logger, "memory plan", plan.describe())
            executor.call("allocate_cache", plan.config)
        with timeline.phase("warm up", is_long=True):
            executor.call("warm_up")
        overlapped = bool(config.scheduler.async_scheduling)
        with timeline.phase("scheduler"):
            caching = config.cache.enable_prefix_caching is not False
            manager = make_manager(
                plan.config, caching, max_model_len, config.scheduler.max_num_batched_tokens
            )
            scheduler = plugins.load("headrace.schedulers", config.scheduler.scheduler_cls)(
                config.scheduler, manager, max_model_len=max_model_len, async_scheduling=overlapped
            )
        stats = config.observability
        return cls(
            scheduler,
            executor,
            overlapped=overlapped,
            log_stats_interval=stats.log_stats_interval if stats.log_stats else 0.0,
            memory_plan=plan.describe(),
            block_size=plan.config.block_size,
            max_model_len=max_model_len,
            step_seconds=profile.step_seconds,
            step_timer=StepTimer.of(config.observability),
        )

    @property
    def has_unfinished(self) -> bool:
        """True while any request has not ended."""
        return self.scheduler.has_unfinished or bool(self._compiling)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do before a command comes; suspended requests may be there."""
        return self.scheduler.is_idle and not self._compiling

    def add(self, request: CoreRequest, *, again: bool = False) -> None:
        """Queue a request; one whose grammar still compiles is kept back meanwhile.

        Args:
            again: it has been kept back before. If its grammar did not compile then, it goes on to
                the worker, which tries once more and says what is wrong.
        """
        constraint, grammars = request.constraint, self.grammars
        if (
            constraint is not None
            and grammars is not None
            and not (again and grammars.failed(constraint))
        ):
            compiled = grammars.request(constraint)
            if not compiled.done():
                self._compiling.append((request, compiled))
                return
        self.scheduler.add(request)

    def compiled(self) -> list[CoreRequest]:
        """Requests that were kept back and need not be any longer; to be added again."""
        if not self._compiling:
            return []
        held, self._compiling = self._compiling, []
        ready = []
        for request, compiled in held:
            if compiled.done():
                ready.append(request)
            else:
                self._compiling.append((request, compiled))
        return ready

    def abort(self, request_ids: Sequence[str]) -> list[CoreOutput]:
        """End requests; unknown ids are ignored."""
        if not self._compiling:
            return self.scheduler.abort(request_ids)
        gone = set(request_ids)
        kept_back = [r.request_id for r, _ in self._compiling if r.request_id in gone]
        self._compiling = [pair for pair in self._compiling if pair[0].request_id not in gone]
        ended = [CoreOutput(request_id, finish_reason="abort") for request_id in kept_back]
        return [*ended, *self.scheduler.abort(request_ids)]

    def suspend(self, request_ids: Sequence[str]) -> None:
        """Compute nothing of these requests until :meth:`resume`; unknown ids are ignored."""
        self.scheduler.suspend(request_ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        """Go on with suspended requests; other ids are ignored."""
        self.scheduler.resume(request_ids)

    def schedule(self) -> ScheduledStep | None:
        """The next step's work, None if there is nothing to run now."""
        return self.scheduler.schedule()

    def take_refused(self) -> list[CoreOutput]:
        """Outputs of requests that ended while a step was filled; each once."""
        return self.scheduler.take_refused()

    def execute(self, step: ScheduledStep) -> Future[StepResult]:
        """Hand a step to the workers; returns at once."""
        return self.executor.submit(step)

    def update(self, step: ScheduledStep, result: StepResult) -> list[CoreOutput]:
        """Take in a step's result: what each request gained."""
        return self.scheduler.update(step, result)

    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]:
        """A step raised: end the request to blame, or find it by computing them one by one."""
        return self.scheduler.fail(step, message)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some and may not be reset."""
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Results of a function of each worker's model, by rank, after the steps that are in flight."""
        return self.executor.call("apply_model", function)

    def run_on_workers(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> list[Any]:
        """Run a function with each worker after the steps that are in flight: results by rank."""
        return self.executor.call(function, *args)

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        """Run a method of every worker after the steps that are in flight: results by rank.

        Raises:
            RequestError: it is not in :data:`WORKER_CALLS`, or takes another number of arguments;
                or weights are to be read while requests run.
            EngineError: the method would have ended a worker; the executor says whether it has.
        """
        if method not in WORKER_CALLS:
            raise RequestError(
                f"method = {method[:64]!r}: must be one of {', '.join(WORKER_CALLS)}",
                param="method",
            )
        if len(args) != WORKER_CALLS[method]:
            raise RequestError(
                f"args: {method} takes {WORKER_CALLS[method] or 'none'}, {len(args)} given",
                param="args",
            )
        try:
            if method == "reload_weights":
                return self._reload_weights()
            return self.executor.call(method, *args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise must_not_end(f"collective_rpc: {method}", error) from error

    def _reload_weights(self) -> list[Any]:
        """Read the weights again, if no request runs. Blocks that other weights computed are forgotten."""
        if self.has_unfinished:
            raise RequestError(
                "method = 'reload_weights': must wait until no request runs: pause first",
                param="method",
            )
        self.reset_prefix_cache()
        return self.executor.call("reload_weights")

    def stats(self, drain: bool = False) -> EngineStats:
        """Counters and gauges; ``drain`` empties the list of step sizes."""
        stats = self.scheduler.stats(drain=drain)
        stats.block_size = self.block_size
        stats.num_requests_waiting += len(self._compiling)
        return stats

    def shutdown(self) -> None:
        """Stop the workers and free everything. Idempotent."""
        self.executor.shutdown()
        if self.grammars is not None:
            self.grammars.close()


def _plan_memory(
    profile: MemoryProfile,
    specs: Mapping[str, CacheSpec],
    config: EngineConfig,
    max_model_len: int,
    fit_context: bool,
) -> CachePlan:
    """The cache, if the model has one, and the longest context (shortened if that is wanted)."""
    from headrace_engine.execution.division import CacheLimits
    from headrace_engine.execution.memory import CachePlan, fit_max_model_len, plan_cache
    from headrace_engine.kv.grouping import plan_groups

    if not specs:
        return CachePlan.without_cache(profile, max_model_len, config.cache.max_memory_bytes)
    groups, device = plan_groups(specs), config.device.device
    limits = CacheLimits.of(config, max_model_len)
    if fit_context:
        fits = fit_max_model_len(profile, groups, config.cache, limits, device=device)
        logger.info("max_model_len: -1 -> %d (the model's own: %d)", fits, max_model_len)
        limits = dataclasses.replace(limits, max_model_len=fits)
    return plan_cache(profile, groups, config.cache, limits, device=device)
