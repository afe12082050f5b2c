"""Several engines as one core: data parallelism on one host.

Each engine is a process with a whole model, a scheduler and a cache of its own; they know nothing of each
other. A request goes to one of them (:mod:`headrace_engine.clients.balancing`), a control call to all.

An engine that ends fails its own requests, and is replaced by a new process while the others serve. It is
not if that could not bring back what it was: its weights were changed since the start; or if it keeps
ending (:mod:`headrace_engine.clients.replica`).
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from headrace_core.engine import EngineStats
from headrace_core.errors import (
    EngineDead,
    GenerateError,
    HeadraceError,
    RequestError,
    UnsupportedFeature,
)
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.balancing import LoadBalancer
from headrace_engine.clients.base import (
    CONTROL_TIMEOUT,
    PROFILE_TIMEOUT,
    CoreClient,
    OutputSink,
    dead_again,
)
from headrace_engine.clients.gathered import failed_call, gathered_calls, summed_stats
from headrace_engine.clients.noted_sleep import NotedSleep, calls_between, noted
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replica import Replica, ReplicaSink
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.startup import StartupTimeline
from headrace_engine.weights.updates import CALLS as UPDATE_CALLS

logger = logging.getLogger(__name__)

READING_CALLS = frozenset(
    {"report", "start_profile", "stop_profile", "is_sleeping", "weights_version"}
)
"""Calls of workers after which a new engine is still like the others."""
BETWEEN_REQUESTS = ("sleep", "reload_weights")
"""Calls that an engine refuses while a request runs: it must be refused by all, or by none."""
POLL_SECONDS = 0.1


class _Placed(NamedTuple):
    """A request that is under way."""

    engine: int
    num_prompt_tokens: int
    num_tokens: list[int]
    """One number: tokens of its output so far."""


class ReplicatedClient(CoreClient):
    """A core that is several engines.

    Args:
        make: a client of engine i, not yet started; called again for its replacement.
        num_engines: at least 1.
        timeline: to continue one that has begun before; default: a new one.
        follows_prefixes: engines keep the blocks of prompts that have ended.
    """

    def __init__(
        self,
        make: Callable[[int], ProcessClient],
        num_engines: int,
        timeline: StartupTimeline | None = None,
        *,
        follows_prefixes: bool = True,
    ) -> None:
        self.timeline = timeline or StartupTimeline()
        self._make = make
        self._replicas = [Replica(index, make(index)) for index in range(num_engines)]
        self._balancer = LoadBalancer(num_engines, follows_prefixes=follows_prefixes)
        self._lock = threading.RLock()
        """Guards everything below, the balancer, and which replicas run."""
        self._placed: dict[str, _Placed] = {}
        self._loras: dict[int, LoRARequest] = {}
        self._sleep: NotedSleep | None = None
        """How engines sleep; None while they are awake."""
        self._changed: str | None = None
        """The call after which a new engine would not be like the others."""
        self._failure: BaseException | None = None
        self._closing = False
        self._context = contextvars.copy_context()
        self._sink: OutputSink | None = None

    @property
    def pids(self) -> list[int | None]:
        """Process ids by engine; None: it does not run."""
        return [replica.client.pid if replica.runs else None for replica in self._replicas]

    def start(self, sink: OutputSink) -> None:
        self._sink = sink
        with self.timeline.phase(f"start {len(self._replicas)} engines"):
            self._start_all()
        self.timeline.finish()
        clients = [replica.client for replica in self._replicas]
        self.max_model_len = min(client.max_model_len for client in clients)
        self.step_seconds = max(client.step_seconds for client in clients)
        plan = clients[0].memory_plan
        self.memory_plan = f"each of {len(clients)} engines: {plan}" if plan else ""

    def _start_all(self) -> None:
        """Start all at once; one that cannot start ends the others."""
        errors: list[BaseException] = []

        def start(replica: Replica) -> None:
            try:
                replica.client.start(ReplicaSink(self, replica, replica.client))
            except BaseException as error:
                errors.append(error)

        threads = [self._thread(start, replica) for replica in self._replicas]
        try:
            while any(thread.is_alive() for thread in threads) and not errors:
                for thread in threads:
                    thread.join(POLL_SECONDS)
            if errors:
                raise errors[0]
        except BaseException:
            self._closing = True
            self._end_all(threads)
            raise

    def _thread(self, work: Callable[[Replica], None], replica: Replica) -> threading.Thread:
        thread = threading.Thread(
            target=self._context.copy().run,
            args=(work, replica),
            name=f"headrace-engine-{replica.index}-start",
            daemon=True,
        )
        thread.start()
        return thread

    def _end_all(self, threads: Sequence[threading.Thread]) -> None:
        """End engines, those too that are starting in ``threads``."""
        while any(thread.is_alive() for thread in threads):
            for replica in self._replicas:
                if not replica.client.has_started:
                    replica.client.kill()
            for thread in threads:
                thread.join(POLL_SECONDS)
        ends = [self._thread(lambda one: one.client.shutdown(), one) for one in self._replicas]
        for thread in ends:
            thread.join()

    # Requests.

    def add(self, requests: Sequence[CoreRequest]) -> None:
        try:
            self._add(requests)
        except BaseException:
            self.abort([request.request_id for request in requests])  # those that were taken
            raise

    def _add(self, requests: Sequence[CoreRequest]) -> None:
        waiting, tried = list(requests), set[int]()
        while waiting:
            groups = self._place(waiting, tried)
            waiting = []
            for replica, client, group in groups:
                try:
                    client.add(group)
                except EngineDead as error:
                    tried.add(replica.index)
                    left = self._taken_back(group)
                    if any(request.data_parallel_rank is not None for request in left):
                        raise _not_now(f"engine {replica.index} takes no requests") from error
                    waiting += left

    def _place(
        self, requests: Sequence[CoreRequest], tried: set[int]
    ) -> list[tuple[Replica, ProcessClient, list[CoreRequest]]]:
        """Choose an engine for each request, and note it.

        Args:
            tried: engines that take none.

        Raises:
            GenerateError: none runs now, or that which a request asks for does not.
            EngineDead: none will run again.
            RequestError: there is no engine of that number.
        """
        groups: dict[int, list[CoreRequest]] = {}
        with self._lock:
            if self._closing:
                raise EngineDead("the engine is shut down")
            if self._failure is not None:
                raise dead_again(self._failure)
            running = [one.index for one in self._replicas if one.runs and one.index not in tried]
            allowed = [self._allowed(request, running) for request in requests]
            for request, engines in zip(requests, allowed, strict=True):
                engine = self._balancer.choose(request, engines)
                num_prompt_tokens = len(request.prompt_token_ids)
                self._placed[request.request_id] = _Placed(engine, num_prompt_tokens, [0])
                groups.setdefault(engine, []).append(request)
            replicas = self._replicas
            return [(replicas[index], replicas[index].client, group)
                    for index, group in groups.items()]  # fmt: skip

    def _allowed(self, request: CoreRequest, running: Sequence[int]) -> Sequence[int]:
        rank = request.data_parallel_rank
        if rank is None:
            if running:
                return running
            raise _not_now("no engine runs: all are being replaced, or take no requests")
        if not 0 <= rank < len(self._replicas):
            raise RequestError(
                f"data_parallel_rank = {rank}: must be in 0..{len(self._replicas) - 1}, the number of an "
                "engine",
                param="data_parallel_rank",
            )
        if rank not in running:
            raise _not_now(f"engine {rank} has ended; requests that name no engine go to another")
        return (rank,)

    def _taken_back(self, requests: Sequence[CoreRequest]) -> list[CoreRequest]:
        """Of requests that an engine did not take: those that were not failed with it already."""
        with self._lock:
            return [request for request in requests if self._forget(request.request_id)]

    def _forget(self, request_id: str) -> _Placed | None:
        """A request is under way no more; returns where it was."""
        placed = self._placed.pop(request_id, None)
        if placed is not None:
            count = placed.num_prompt_tokens + placed.num_tokens[0]
            self._balancer.add_tokens(placed.engine, -count)
        return placed

    def _by_engine(self, request_ids: Sequence[str], *, forget: bool = False) -> list[
        tuple[ProcessClient, list[str]]
    ]:  # fmt: skip
        groups: dict[int, list[str]] = {}
        with self._lock:
            for request_id in request_ids:
                placed = self._forget(request_id) if forget else self._placed.get(request_id)
                if placed is not None:
                    groups.setdefault(placed.engine, []).append(request_id)
            return [(self._replicas[index].client, ids) for index, ids in groups.items()]

    def abort(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_engine(request_ids, forget=True):
            client.abort(ids)

    def suspend(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_engine(request_ids):
            client.suspend(ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_engine(request_ids):
            client.resume(ids)

    # Control calls.

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        """Sums, with each engine's own numbers in :attr:`EngineStats.by_engine`; those of one that does not
        run are zeros, with the reason."""
        with self._lock:
            ended = {one.index: str(one) for one in self._replicas if not one.runs}
            if self._failure is not None:
                return failed_call(dead_again(self._failure))
            asked = {one.index: one.client.stats(drain) for one in self._replicas if one.runs}
        indices = list(asked)

        def merged(found: list[EngineStats | BaseException]) -> EngineStats:
            by_engine = {index: EngineStats(ended=why) for index, why in ended.items()}
            for index, stats in zip(indices, found, strict=True):
                if isinstance(stats, BaseException):
                    stats = EngineStats(ended=f"engine {index}: {stats}")
                by_engine[index] = stats
            return summed_stats([by_engine[index] for index in sorted(by_engine)])

        return gathered_calls(list(asked.values()), merged, errors=True)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        with self._lock:
            self._balancer.forget_prefixes()
        return gathered_calls(
            [client.reset_prefix_cache(reset_running_requests) for client in self._running()], all
        )

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        with self._lock:
            clients, before = self._running(), self._loras.get(request.lora_int_id)
            self._loras[request.lora_int_id] = request
            calls = [client.add_lora(request) for client in clients]

        def merged(results: list[Any]) -> bool:
            failures = [result for result in results if isinstance(result, BaseException)]
            if not failures:
                return all(results)
            self._take_back_adapter(request, before)
            for client, result in zip(clients, results, strict=True):
                if result is True:
                    client.remove_lora(request.lora_int_id)
            raise failures[0]

        return gathered_calls(calls, merged, errors=True)

    def _take_back_adapter(self, request: LoRARequest, before: LoRARequest | None) -> None:
        """An adapter was refused by an engine: a replacement need not read it, and none keeps it."""
        with self._lock:
            if self._loras.get(request.lora_int_id) is not request:
                return
            if before is None:
                del self._loras[request.lora_int_id]
            else:
                self._loras[request.lora_int_id] = before

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        with self._lock:
            self._loras.pop(lora_int_id, None)
            return gathered_calls(
                [client.remove_lora(lora_int_id) for client in self._running()], any
            )

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        return self._running()[0].list_loras()

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """Results of all engines' workers, engine 0 first.

        Raises:
            UnsupportedFeature: the call joins workers in a group: each engine has a rank 0.
            RequestError: a request runs, and the call must be obeyed by all engines or none.
            GenerateError: an engine does not run, and the call changes it.
        """
        if method in UPDATE_CALLS:
            raise UnsupportedFeature(
                f"{method}: not with data_parallel_size = {len(self._replicas)}: new weights would have to "
                "reach each engine's ranks; reload_weights and swap_weights work, from files",
                param="method",
            )
        with self._lock:
            clients = self._running()
            if method in READING_CALLS:
                return gathered_calls(
                    [one.call_workers(method, args) for one in clients], _in_a_row
                )
            ailments = self.ailments
            if ailments:
                raise _not_now(f"{method}: must reach all engines: {'; '.join(ailments)}")
            if method in BETWEEN_REQUESTS and self._placed:
                raise RequestError(
                    f"method = {method!r}: must wait until no request runs: pause first",
                    param="method",
                )
            before = self._sleep, self._changed
            self._note_change(method, args)
            noted = self._sleep, self._changed
            calls = [client.call_workers(method, args) for client in clients]

        def merged(results: list[Any]) -> list[Any]:
            failures = [result for result in results if isinstance(result, BaseException)]
            if not failures:
                return _in_a_row(results)
            refused = all(isinstance(result, RequestError) for result in results)
            with self._lock:
                if refused and (self._sleep, self._changed) == noted:  # nothing has changed
                    self._sleep, self._changed = before
            raise failures[0]

        return gathered_calls(calls, merged, errors=True)

    def _note_change(self, method: str, args: Sequence[Any]) -> None:
        """Note what a replacement must be told, or that there can be none."""
        self._balancer.forget_prefixes()
        if method in ("sleep", "wake_up"):
            self._sleep = noted(self._sleep, method, args)
        else:
            self._changed = method

    def _running(self) -> list[ProcessClient]:
        """Clients of engines that run.

        Raises:
            GenerateError: none does now.
            EngineDead: none will again.
        """
        with self._lock:
            if self._failure is not None:
                raise dead_again(self._failure)
            clients = [replica.client for replica in self._replicas if replica.runs]
            if not clients:
                raise _not_now("no engine runs: " + "; ".join(self.ailments))
            return clients

    # Health.

    @property
    def ailments(self) -> list[str]:
        """What is wrong with engines that do not run, one text for each."""
        return [str(replica) for replica in self._replicas if not replica.runs]

    def trouble(self, limit: float) -> str | None:
        """An engine that is being replaced is none: the others serve."""
        for replica in self._replicas:
            if not replica.runs and replica.replacement is None:
                return str(replica)
            stuck = replica.client.trouble(limit) if replica.runs else None
            if stuck is not None:
                return f"engine {replica.index}: {stuck}"
        return None

    @property
    def heartbeat_age(self) -> float:
        return max((one.client.heartbeat_age for one in self._replicas if one.runs), default=0.0)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def shutdown(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            threads = [one.replacement for one in self._replicas if one.replacement is not None]
        self._end_all(threads)

    # From the readers' threads.

    def take_outputs(self, outputs: CoreOutputs) -> None:
        """Note how far requests are, and pass their outputs on."""
        with self._lock:
            for output in outputs.outputs:
                self._note_output(output)
        if self._sink is not None:
            self._sink.on_outputs(outputs)

    def _note_output(self, output: CoreOutput) -> None:
        placed = self._placed.get(output.request_id)
        if placed is None:
            return
        if output.finish_reason is not None:
            self._forget(output.request_id)
            return
        count = len(output.new_token_ids)
        placed.num_tokens[0] += count
        self._balancer.add_tokens(placed.engine, count)

    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None:
        """A process of an engine has ended: fail its requests, and replace it. Whoever starts a
        replacement notices the end of that one itself."""
        with self._lock:
            if self._closing or replica.client is not client or not replica.runs:
                return
            lost = [key for key, at in self._placed.items() if at.engine == replica.index]
            for request_id in lost:
                self._forget(request_id)
            self._balancer.forget(replica.index)
            replica.failure = str(error)
            why_not = self._changed_since_start() or replica.fell(time.monotonic())
            if why_not is None:
                replica.replacement = self._thread(self._replace, replica)
            else:
                replica.failure += f" ({why_not})"
            nothing_left = self._nothing_left()
        logger.error("%s; %d of its requests failed", replica, len(lost))
        # What a core said of its own error stays in the log.
        cause = str(error) if error.__cause__ is None else "the engine process failed"
        message = f"engine {replica.index}: {cause}"
        failed = [
            CoreOutput(one, finish_reason="error", error=message, engine_ended=True) for one in lost
        ]
        if failed and self._sink is not None:
            self._sink.on_outputs(CoreOutputs(failed, time.monotonic()))
        if nothing_left:
            self._give_up(error)

    def _changed_since_start(self) -> str | None:
        """Why no new engine would be like the others; None: it would."""
        if self._changed is None:
            return None
        return f"{self._changed} was called since the start, which a new engine would lack"

    def _nothing_left(self) -> bool:
        return all(not one.runs and one.replacement is None for one in self._replicas)

    def _give_up(self, error: BaseException) -> None:
        self._failure = EngineDead(f"all engines have ended: {'; '.join(self.ailments)}")
        self._failure.__cause__ = error
        if self._sink is not None:
            self._sink.on_death(self._failure)

    def _replace(self, replica: Replica) -> None:
        """Start processes of an engine until one runs and is where the others are, or too many failed."""
        ended = replica.failure
        while True:
            if replica.client.has_started:
                replica.client.shutdown()
            try:
                client = self._make(replica.index)
                with self._lock:
                    if self._closing:
                        return
                    replica.client = client
                client.start(ReplicaSink(self, replica, client))
                self._catch_up(replica, client)
                return
            except BaseException as error:
                with self._lock:
                    if self._closing:
                        return
                    why_not = self._changed_since_start()
                    why_not = why_not or replica.failed_to_start(time.monotonic())
                    replica.failure = f"{ended} (its replacement: {error})"
                    if why_not is not None:
                        replica.failure += f" ({why_not})"
                        replica.replacement = None
                    nothing_left = self._nothing_left()
                logger.error("%s", replica)
                if why_not is None:
                    continue
                if replica.client.has_started:
                    replica.client.shutdown()
                if nothing_left:
                    self._give_up(error)
                return

    def _catch_up(self, replica: Replica, client: ProcessClient) -> None:
        """Have a new engine read the adapters that the others have, and sleep while they do; requests
        come to it then.

        Raises:
            EngineDead: it has ended meanwhile.
        """
        known: dict[int, LoRARequest] = {}
        asleep: NotedSleep | None = None
        while True:
            with self._lock:
                wanted = [one for key, one in self._loras.items() if known.get(key) is not one]
                gone = [key for key in known if key not in self._loras]
                sleep = self._sleep
                if not wanted and not gone and sleep is asleep:
                    if client.failure is not None:
                        raise dead_again(client.failure)
                    replica.runs_again()
                    logger.info("engine %d runs again", replica.index)
                    return
            for lora_int_id in gone:
                del known[lora_int_id]
                client.remove_lora(lora_int_id).result(CONTROL_TIMEOUT)
            for lora in wanted:
                known[lora.lora_int_id] = lora
                _read_adapter(client, lora, replica)
            if not wanted and not gone:
                for call in calls_between(asleep, sleep):
                    client.call_workers(*call).result(CONTROL_TIMEOUT)
                asleep = sleep


def _read_adapter(client: ProcessClient, lora: LoRARequest, replica: Replica) -> None:
    """Have a new engine read an adapter. One that it cannot read, because its files have gone for example,
    fails the requests that name it, and nothing else.

    Raises:
        EngineDead: the engine has ended.
    """
    try:
        client.add_lora(lora).result(PROFILE_TIMEOUT)
    except EngineDead:
        raise
    except HeadraceError as error:
        logger.warning(
            "engine %d does not have adapter %s: %s", replica.index, lora.lora_name, error
        )


def _in_a_row(results: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for each in results for value in each]


def _not_now(message: str) -> GenerateError:
    """The error of a request that may succeed later."""
    error = GenerateError(message)
    error.is_public = True
    return error
