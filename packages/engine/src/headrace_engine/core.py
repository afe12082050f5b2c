"""The engine's core: scheduler, cache and workers under one roof, and how it is put together.

The core knows token ids only. :mod:`headrace_engine.loop` drives it; nothing here waits for
anything but the start of the workers.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headrace_core import plugins
from headrace_core.engine import EngineStats
from headrace_core.errors import RequestError
from headrace_core.executor import Executor, MemoryProfile
from headrace_core.kv import CacheSpec, KVCacheConfig, KVCacheGroup, KVConnector
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import EngineConfig
from headrace_engine.guests import must_not_end
from headrace_engine.lockstep.turns import LockstepTurns
from headrace_engine.log_lines import log_block
from headrace_engine.lora.store import AdapterStore, KnownAdapter, failure_of, no_adapters
from headrace_engine.messages import CoreOutput
from headrace_engine.scheduler.draft_limits import DraftLimits
from headrace_engine.sleep.engine_sleep import CALLS as SLEEP_CALLS
from headrace_engine.sleep.engine_sleep import EngineSleep
from headrace_engine.startup import StartupTimeline
from headrace_engine.step_timer import StepTimer
from headrace_engine.structured.store import GrammarStore
from headrace_engine.weights.extension import extension_methods, load_extension
from headrace_engine.weights.order import SwapOrder
from headrace_engine.weights.swap import WeightsSwap
from headrace_engine.weights.updates import CALLS as UPDATE_CALLS
from headrace_engine.weights.updates import PARAMETERS as UPDATE_PARAMETERS
from headrace_engine.weights.updates import EngineUpdates
from headrace_engine.weights.version import WeightsVersion, checked_version, counted_up

if TYPE_CHECKING:
    from headrace_engine.execution.memory import CachePlan
    from headrace_engine.kv.event_publisher import EventPublisher
    from headrace_engine.kv.events import BlockEventLog

logger = logging.getLogger(__name__)

WORKER_CALLS = {
    "report": 0, "start_profile": 0, "stop_profile": 0, "update_config": 1, "reload_weights": 0,
    "sleep": 1, "wake_up": 1, "is_sleeping": 0, "weights_version": 0, "set_weights_version": 1,
    "swap_weights": 1,
    **UPDATE_CALLS,
}  # fmt: skip
"""Worker methods, and calls of the core for all of them, that may be called from outside, and how many
arguments each takes. A list of what may, never of what may not: a worker has methods that would end it."""
PARAMETERS: Mapping[str, Sequence[str]] = {
    "update_config": ("changes",), "sleep": ("level",), "wake_up": ("tags",),
    "set_weights_version": ("version",), **UPDATE_PARAMETERS,
}  # fmt: skip
"""Names of the arguments of those that take some."""
BETWEEN_STEPS = (*SLEEP_CALLS, "set_weights_version", *UPDATE_CALLS)
"""Calls before which steps in flight must have ended."""


class StepScheduler(Protocol):
    """A scheduler, as the core needs it (``headrace.schedulers``)."""

    def add(self, request: CoreRequest) -> None: ...
    def abort(self, request_ids: Sequence[str]) -> list[CoreOutput]: ...
    def schedule(self) -> ScheduledStep | None: ...
    def suspend(self, request_ids: Sequence[str]) -> None: ...
    def resume(self, request_ids: Sequence[str]) -> None: ...
    def resume_all(self) -> None: ...
    def take_refused(self) -> list[CoreOutput]: ...
    def forget_adapters(self) -> None: ...
    def forget_prefixes(self) -> list[str]: ...
    def update(
        self, step: ScheduledStep, result: StepResult, told: dict[str, int] | None = None
    ) -> list[CoreOutput]: ...
    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]: ...
    @property
    def has_unfinished(self) -> bool: ...
    @property
    def is_idle(self) -> bool: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def stats(self, *, drain: bool = False) -> EngineStats: ...


class _HeldRequest(NamedTuple):
    """A request that is kept back."""

    request: CoreRequest
    waits_for: Future[Any]


class EngineCore:
    """One model's scheduler and workers. Used from one thread."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        *,
        overlapped: bool = True,
        steps_beside: int = 1,
        log_stats_interval: float = 0.0,
        memory_plan: str = "",
        block_size: int = 0,
        max_model_len: int = 0,
        step_seconds: float = 0.0,
        grammars: GrammarStore | None = None,
        step_timer: StepTimer | None = None,
        adapters: AdapterStore | None = None,
        sleep_mode: bool = False,
        extension_calls: frozenset[str] = frozenset(),
        kv_events: tuple[BlockEventLog, EventPublisher] | None = None,
    ) -> None:
        """
        Args:
            scheduler: owns the KV-cache manager.
            executor: started, with the cache allocated.
            overlapped: schedule the next step before the current one's result is there.
            steps_beside: steps that run beside each other, in stages.
            log_stats_interval: seconds between log lines; 0 = none.
            memory_plan: where the memory went, for people.
            block_size: tokens per block, for the statistics.
            max_model_len: longest context that it serves; 0 = as configured.
            step_seconds: about what the largest step takes; 0 = not measured.
            grammars: the workers'; requests wait here until theirs is compiled.
            step_timer: has the loop time its steps; None: they are not.
            adapters: the workers', and the scheduler's; requests wait here until theirs is read.
            sleep_mode: the workers can give their memory back.
            extension_calls: methods of the workers, beside :data:`WORKER_CALLS`, that may be called from
                outside.
            kv_events: of the KV manager, and who sends them; None: nobody listens.
        """
        self.scheduler = scheduler
        self.executor = executor
        self.overlapped = overlapped
        self.steps_beside = steps_beside
        self.log_stats_interval = log_stats_interval
        self.memory_plan = memory_plan
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.step_seconds = step_seconds
        self.grammars = grammars
        self.step_timer = step_timer
        self.adapters = adapters
        self.extension_calls = extension_calls
        self._kv_events = kv_events
        self.weights = WeightsVersion()
        """Version of the weights that compute. Whatever changes them calls :meth:`weights_changed`."""
        self.swap = WeightsSwap(executor, self)
        """The weights that are on their way, if some are."""
        self._sleep = EngineSleep(executor, sleep_mode)
        self._updates = EngineUpdates(executor, self._sleep, self, self.weights)
        self._tells_tokens = "told" in inspect.signature(scheduler.update).parameters
        """False of a scheduler of somebody else's that gives each request an output in each step."""
        self.lockstep: LockstepTurns | None = None
        """Passes of other engines in which this one takes part; None: there are none."""
        self._held: list[_HeldRequest] = []
        self._entered: dict[str, KnownAdapter] = {}
        """By request: the adapter that it has waited for, which stays known meanwhile."""

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
        adapters: AdapterStore | None = None,
        connector: KVConnector | None = None,
        model: str = "",
    ) -> EngineCore:
        """Start the workers, plan and allocate the cache, warm up.

        Args:
            config: resolved (:func:`headrace.assembly.resolution.resolve`).
            max_model_len: longest context.
            executor: not yet started; shut down again if anything here fails.
            timeline: gets one phase per piece of work.
            fit_context: shorten ``max_model_len`` to what the cache can hold, instead of refusing.
            grammars: of structured output, shared with the workers of this process.
            adapters: likewise; None: requests have none.
            connector: likewise, of blocks outside the cache; None: there are none.
            model: names what such blocks depend on, but for the cache's layout.

        Raises:
            CapacityError: the longest request would not fit into the cache.
            ModelError, WeightsError, ConfigError: from the workers.
        """
        try:
            core = cls._build(
                config, max_model_len, executor, timeline, fit_context, adapters, connector, model
            )
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
        adapters: AdapterStore | None,
        connector: KVConnector | None,
        model: str,
    ) -> EngineCore:
        with timeline.phase("import engine"):
            import headrace_engine.execution.memory  # noqa: F401 - timed here
            from headrace_engine.execution.division import CacheLimits
            from headrace_engine.kv.events import BlockEventLog
            from headrace_engine.kv.factory import make_manager
            from headrace_engine.kv.spare_states import without_spares
            from headrace_engine.kv_transfer.making import make_transfer
            from headrace_engine.kv_transfer.moves import block_sizes
            from headrace_engine.kv_transfer.scheduler import check_layers
            from headrace_engine.scheduler.adapter_slots import SlotPlanner
            from headrace_engine.scheduler.keywords import check_scheduler

            check_scheduler(config, _asked_of_scheduler(config, adapters, connector))
        with timeline.phase("start workers"):
            executor.start()
        with timeline.phase("load model", is_long=True):
            executor.call("load")
        with timeline.phase("profile memory"):
            specs = executor.call("kv_specs")
            profile = _tightest(executor.call("profile"))
        with timeline.phase("allocate cache"):
            plan = _plan_memory(profile, specs, config, max_model_len, fit_context)
            max_model_len = plan.max_model_len
            ranks = config.parallel.num_ranks
            title = "memory plan" if ranks == 1 else f"memory plan of each of {ranks} ranks"
            log_block(logger, title, plan.describe())
            if connector is not None:
                check_layers(plan.config)
                connector.check_block(max(block_sizes(plan.config)))
            executor.call("allocate_cache", _with_layers(plan.config, specs))
        with timeline.phase("warm up", is_long=True):
            executor.call("warm_up")
        overlapped = bool(config.scheduler.async_scheduling)
        with timeline.phase("scheduler"):
            caching = config.cache.enable_prefix_caching is not False
            limits = CacheLimits.of(config, max_model_len)
            publisher = _publisher(config)
            events = None if publisher is None else BlockEventLog(plan.config.block_size)
            manager = make_manager(
                without_spares(plan.config, limits.spare_states),
                caching,
                max_model_len,
                config.scheduler.max_num_batched_tokens,
                most_behind=limits.most_behind,
                events=events,
            )
            settings: dict[str, Any] = {**_draft_limits(config)}
            steps_beside = _steps_beside(config)
            if steps_beside > 1:
                settings["steps_beside"] = steps_beside
            if adapters is not None:
                settings["adapters"] = SlotPlanner(config.lora.max_loras, adapters)
            if connector is not None:
                settings["transfer"] = make_transfer(
                    connector, config, model, executor, plan.config, manager
                )
            scheduler = plugins.load("headrace.schedulers", config.scheduler.scheduler_cls)(
                config.scheduler,
                manager,
                max_model_len=max_model_len,
                async_scheduling=overlapped,
                **settings,
            )
        stats = config.observability
        extension = load_extension(config.parallel.worker_extension_cls)
        return cls(
            scheduler,
            executor,
            overlapped=overlapped,
            steps_beside=steps_beside,
            log_stats_interval=stats.log_stats_interval if stats.log_stats else 0.0,
            memory_plan=plan.describe(),
            block_size=plan.config.block_size,
            max_model_len=max_model_len,
            step_seconds=profile.step_seconds,
            step_timer=StepTimer.of(config.observability),
            adapters=adapters,
            sleep_mode=config.device.enable_sleep_mode,
            extension_calls=extension_methods(extension) if extension is not None else frozenset(),
            kv_events=None if publisher is None or events is None else (events, publisher),
        )

    @property
    def has_unfinished(self) -> bool:
        """True while any request has not ended."""
        return self.scheduler.has_unfinished or bool(self._held)

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do before a command comes; suspended requests may be there."""
        return self.scheduler.is_idle and not self._held and not self.swap.is_under_way

    def add(self, request: CoreRequest, *, again: bool = False) -> None:
        """Queue a request; one whose adapter is read, or grammar compiled, is kept back meanwhile.

        Args:
            again: it has been kept back before. If its grammar did not compile then, it goes on to
                the worker, which tries once more and says what is wrong.

        Raises:
            EngineAsleep: it has no weights or no cache now.
            RequestError: the engine takes no adapters, or this one cannot be used.
        """
        self._sleep.check_awake()
        waits = False
        try:
            waits = (
                self._waits_for_weights(request)
                or self._waits_for_adapter(request, again)
                or self._waits_for_grammar(request, again)
            )
            if not waits:
                self.scheduler.add(request)
        finally:
            if not waits:
                self._leave_adapter(request)

    def ready(self) -> list[CoreRequest]:
        """Requests that were kept back and need not be any longer; to be added again."""
        if not self._held:
            return []
        held, self._held = self._held, []
        ready = []
        for one in held:
            if one.waits_for.done():
                ready.append(one.request)
            else:
                self._held.append(one)
        return ready

    def abort(self, request_ids: Sequence[str]) -> list[CoreOutput]:
        """End requests; unknown ids are ignored."""
        if not self._held:
            return self.scheduler.abort(request_ids)
        gone, ended, held = set(request_ids), [], self._held
        self._held = [one for one in held if one.request.request_id not in gone]
        for one in held:
            if one.request.request_id in gone:
                ended.append(CoreOutput(one.request.request_id, finish_reason="abort"))
                self._leave_adapter(one.request)
        return [*ended, *self.scheduler.abort(request_ids)]

    def _waits_for_weights(self, request: CoreRequest) -> bool:
        if self.swap.ends is None:
            return False
        self._held.append(_HeldRequest(request, self.swap.ends))
        return True

    def _waits_for_adapter(self, request: CoreRequest, again: bool) -> bool:
        if request.lora_request is None:
            return False
        adapters, before = self._adapters(), self._entered.get(request.request_id)
        if before is not None and (error := failure_of(before.first_read)) is not None:
            raise error
        adapter = adapters.add(request.lora_request, under_way=again)
        if adapter.first_read.done():
            return False
        adapters.enter(adapter)
        self._entered[request.request_id] = adapter
        self._held.append(_HeldRequest(request, adapter.first_read))
        return True

    def _waits_for_grammar(self, request: CoreRequest, again: bool) -> bool:
        constraint, grammars = request.constraint, self.grammars
        if constraint is None or grammars is None or (again and grammars.failed(constraint)):
            return False
        compiled = grammars.request(constraint)
        if compiled.done():
            return False
        self._held.append(_HeldRequest(request, compiled))
        return True

    def _leave_adapter(self, request: CoreRequest) -> None:
        """A request waits here for its adapter no longer."""
        adapter = self._entered.pop(request.request_id, None)
        if adapter is not None and self.adapters is not None:
            self.adapters.leave(adapter)

    def _adapters(self) -> AdapterStore:
        if self.adapters is None:
            raise no_adapters()
        return self.adapters

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        """Make an adapter known: resolves when it is read; False: it was known.

        Raises:
            UnsupportedFeature: the engine takes none.
            EngineAsleep: there is no model that it could be checked against.
            RequestError: its id has another path. The result may raise it, too: it cannot be used.
        """
        self._sleep.check_awake()
        adapters, done = self._adapters(), Future[bool]()
        known = request.lora_int_id in {one.lora_int_id for one in adapters.known()}

        def answer(read: Future[KnownAdapter]) -> None:
            error = read.exception()
            if error is None:
                done.set_result(not known)
            else:
                done.set_exception(error)

        adapters.add(request).first_read.add_done_callback(answer)
        return done

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        """Take no further requests with an adapter; see :meth:`AdapterStore.remove`.

        Raises:
            UnsupportedFeature: the engine takes none.
        """
        return self._adapters().remove(lora_int_id)

    def list_loras(self) -> tuple[LoRARequest, ...]:
        """Adapters that are known, by id; none where the engine takes none."""
        return () if self.adapters is None else tuple(self.adapters.known())

    def suspend(self, request_ids: Sequence[str]) -> None:
        """Compute nothing of these requests until :meth:`resume`; unknown ids are ignored. Nothing happens
        while other weights wait for them to end."""
        if self.swap.ends is None:
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

    def update(
        self, step: ScheduledStep, result: StepResult, told: dict[str, int] | None = None
    ) -> list[CoreOutput]:
        """Take in a step's result: what each request gained.

        Args:
            told: gets the tokens of requests of which there is nothing else to tell, by request; they may
                have no output then.
        """
        if self._tells_tokens:
            return self.scheduler.update(step, result, told)
        for request_id, token in result.tokens.items():
            result.requests[request_id] = RequestStepResult([token])
        result.tokens.clear()
        return self.scheduler.update(step, result)

    def fail(self, step: ScheduledStep, message: str) -> list[CoreOutput]:
        """A step raised: end the request to blame, or find it by computing them one by one."""
        return self.scheduler.fail(step, message)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False while requests hold some and may not be reset."""
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def weights_changed(self, version: str) -> None:
        """Other weights compute from now on; no step may be in flight. Cached prefixes are not found again.
        Requests that run go on with what they hold, and their outputs tell both versions.

        Args:
            version: of the new weights.
        """
        self.weights.change(version, self.scheduler.forget_prefixes())

    def swap_weights(self, options: object) -> Future[list[Any]]:
        """Read other weights beside these, check them, and serve with them; see :meth:`WeightsSwap.begin`.

        Args:
            options: plain data; see :class:`SwapOrder`.

        Raises:
            RequestError: an option is wrong, or a swap is under way.
            EngineAsleep: there is no model that they could be compared with.
            UnsupportedFeature: the workers cannot.
        """
        self._sleep.check_awake()
        self._updates.check_none_open("swap_weights")
        return self.swap.begin(SwapOrder.of(options))

    def call_beside(self, method: str, args: Sequence[Any]) -> Future[list[Any]]:
        """See :meth:`EngineUpdates.call_beside`.

        Raises:
            RequestError: it cannot be done now, or takes another number of arguments.
        """
        _check_arguments(method, args)
        self.swap.check_none(method)
        return self._updates.call_beside(method, args)

    def drain(self) -> bool:
        """See :class:`headrace_engine.weights.swap.SwapTarget`."""
        self.scheduler.resume_all()
        return not self.scheduler.has_unfinished and self.reset_prefix_cache()

    def weights_swapped(self, version: str | None) -> tuple[str, str]:
        """See :class:`headrace_engine.weights.swap.SwapTarget`."""
        if self.adapters is not None:
            self.scheduler.forget_adapters()
        self._updates.swapped()
        before = self.weights.current
        self.weights_changed(counted_up(before) if version is None else version)
        return before, self.weights.current

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
                or memory is to be freed or taken while requests run, or in another order than
                :class:`EngineSleep` allows.
            EngineError: the method would have ended a worker; the executor says whether it has.
        """
        if method in self.extension_calls:
            return self._call_extension(method, args)
        if method not in WORKER_CALLS:
            known = ", ".join((*WORKER_CALLS, *sorted(self.extension_calls)))
            raise RequestError(f"method = {method[:64]!r}: must be one of {known}", param="method")
        _check_arguments(method, args)
        try:
            if method == "is_sleeping":
                return [self._sleep.is_sleeping]
            if method == "weights_version":
                return [self.weights.current]
            if method in SLEEP_CALLS:
                return self._call_sleep(method, *args)
            if method in BETWEEN_STEPS:
                self.swap.check_none(method)
            if method == "set_weights_version":
                self.weights_changed(checked_version(args[0]))
                return []
            if method in UPDATE_CALLS:
                return self._updates.call(method, args)
            return self.executor.call(method, *args)
        except (SystemExit, KeyboardInterrupt) as error:
            raise must_not_end(f"collective_rpc: {method}", error) from error

    def _call_extension(self, method: str, args: Sequence[Any]) -> list[Any]:
        try:
            results = self.executor.call(method, *args)
            self._updates.may_hold = True  # by load_weights
            return results
        except (SystemExit, KeyboardInterrupt) as error:
            raise must_not_end(f"collective_rpc: {method}", error) from error

    def _call_sleep(self, method: str, argument: Any = None) -> list[Any]:
        """Free memory, or take it, if no request runs. Engines that share experts all do so, or none."""
        check = partial(self._check_sleep_call, method, argument)
        obey = partial(self._obey_sleep_call, method, argument)
        if self.lockstep is None:
            check()
            return obey()
        take_back = partial(self._sleep.take_back, method)
        call = method if argument is None else f"{method} {argument!r}"
        return self.lockstep.obey(call, check=check, obey=obey, take_back=take_back)

    def _check_sleep_call(self, method: str, argument: Any) -> None:
        self.swap.check_none(method)
        if method == "wake_up":
            self._sleep.check_wake_up(argument)
            return
        if method == "sleep":
            self._updates.check_sleep(self._sleep.check_sleep(argument))
        else:
            self._updates.check_sleep(0)
        if self.has_unfinished:
            raise RequestError(
                f"method = {method!r}: must wait until no request runs: pause first", param="method"
            )
        self._updates.check_none_open(method)
        if method == "reload_weights":
            self._sleep.check_reload()

    def _obey_sleep_call(self, method: str, argument: Any) -> list[Any]:
        """Blocks that other weights computed are forgotten."""
        if method == "wake_up":
            self._sleep.wake_up(argument)
            self._updates.woke()
            return []
        self.reset_prefix_cache()
        if self.adapters is not None:
            self.scheduler.forget_adapters()
        if method == "reload_weights":
            results = self._sleep.reload_weights()
            self._updates.reloaded()
            return results
        self._sleep.sleep(argument)
        return []

    def stats(self, drain: bool = False) -> EngineStats:
        """Counters and gauges; ``drain`` empties the list of step sizes."""
        stats = self.scheduler.stats(drain=drain)
        stats.block_size = self.block_size
        stats.sleep_level = self._sleep.level
        stats.weights_version = self.weights.current
        stats.num_requests_waiting += len(self._held)
        for one in self._held:
            if (lora := one.request.lora_request) is not None:
                waiting = stats.waiting_loras
                waiting[lora.lora_name] = waiting.get(lora.lora_name, 0) + 1
        return stats

    def publish_events(self) -> None:
        """Send the KV manager's events since the last call, if somebody listens."""
        if self._kv_events is not None:
            log, publisher = self._kv_events
            if events := log.take():
                publisher.publish(events)

    def shutdown(self) -> None:
        """Stop the workers and free everything. Idempotent."""
        if self._kv_events is not None:
            self._kv_events[1].shutdown()
        if self.lockstep is not None:
            self.lockstep.close()
        self.executor.shutdown()
        if self.grammars is not None:
            self.grammars.close()
        if self.adapters is not None:
            self.adapters.close()


def _publisher(config: EngineConfig) -> EventPublisher | None:
    """Who publishes events of the KV cache, if they are asked for. ZeroMQ is imported for them only."""
    if not config.kv_events.enable_kv_cache_events:
        return None
    from headrace_engine.kv.event_publisher import make_publisher

    return make_publisher(config.kv_events, config.parallel.first_engine)


def _check_arguments(method: str, args: Sequence[Any]) -> None:
    """Raises: RequestError, the call takes another number of them."""
    if len(args) != WORKER_CALLS[method]:
        raise RequestError(
            f"args: {method} takes {WORKER_CALLS[method] or 'none'}, {len(args)} given",
            param="args",
        )


def _steps_beside(config: EngineConfig) -> int:
    """Steps that run beside each other: one on each stage, where a step is nothing but a pass."""
    alone = not config.scheduler.async_scheduling or config.speculative.num_drafts > 0
    return 1 if alone else config.parallel.pipeline_parallel_size


def _asked_of_scheduler(
    config: EngineConfig, adapters: AdapterStore | None, connector: KVConnector | None
) -> dict[str, str]:
    """Keywords that a scheduler gets beyond the contract's, and the settings that they are for."""
    stages, guesses = config.parallel.pipeline_parallel_size, config.speculative.num_drafts
    asked = {
        "steps_beside": (_steps_beside(config) > 1, f"parallel.pipeline_parallel_size = {stages}"),
        "drafts": (guesses > 0, f"speculative.num_speculative_tokens = {guesses}"),
        "adapters": (adapters is not None, "lora.enable_lora = True"),
        "transfer": (connector is not None, "cache.kv_transfer_config"),
    }
    return {keyword: setting for keyword, (is_asked, setting) in asked.items() if is_asked}


def _draft_limits(config: EngineConfig) -> dict[str, DraftLimits]:
    """The scheduler's keyword for guesses, where there are any."""
    speculative = config.speculative
    if not speculative.num_drafts:
        return {}
    return {"drafts": DraftLimits(speculative.num_drafts, speculative.disable_by_batch_size)}


def _tightest(profiles: Sequence[MemoryProfile]) -> MemoryProfile:
    """Memory of the rank that has the least, whose cache is every rank's: what any of them takes, and what
    each of them has."""
    return MemoryProfile(
        max(one.weights for one in profiles),
        max(one.activations for one in profiles),
        min(one.available for one in profiles),
        max(one.step_seconds for one in profiles),
    )


def _groups(specs: Sequence[Mapping[str, CacheSpec]]) -> tuple[KVCacheGroup, ...]:
    """Cache groups of the layers of all ranks."""
    from headrace_engine.kv.grouping import plan_groups

    stages: list[Mapping[str, CacheSpec]] = []
    for own in specs:
        # Ranks of one stage have the same layers, but for those that guess tokens on rank 0.
        if not any(own.keys() <= stage.keys() for stage in stages):
            stages.append(own)
    merged = {name: spec for own in stages for name, spec in own.items()}
    return plan_groups(merged, stages)


def _with_layers(config: KVCacheConfig, specs: Sequence[Mapping[str, CacheSpec]]) -> KVCacheConfig:
    """The planned cache, with the layers of all ranks in its groups."""
    return dataclasses.replace(config, groups=_groups(specs)) if config.groups else config


def _plan_memory(
    profile: MemoryProfile,
    specs: Sequence[Mapping[str, CacheSpec]],
    config: EngineConfig,
    max_model_len: int,
    fit_context: bool,
) -> CachePlan:
    """The cache as the rank with the most layers has it, if the model has one, and the longest context
    (shortened if that is wanted).

    Args:
        specs: of the layers of each rank.
    """
    from headrace_engine.execution.division import CacheLimits
    from headrace_engine.execution.memory import (
        CachePlan,
        fit_max_model_len,
        of_one_rank,
        plan_cache,
    )
    from headrace_engine.kv.grouping import largest_share

    config = of_one_rank(config)
    if not any(specs):
        return CachePlan.without_cache(profile, max_model_len, config.cache.max_memory_bytes)
    groups, device = largest_share(_groups(specs), specs), config.device.device
    limits = CacheLimits.of(config, max_model_len)
    if fit_context:
        fits = fit_max_model_len(profile, groups, config.cache, limits, device=device)
        logger.info("max_model_len: -1 -> %d (the model's own: %d)", fits, max_model_len)
        limits = dataclasses.replace(limits, max_model_len=fits)
    return plan_cache(profile, groups, config.cache, limits, device=device)
