"""Several engines as one core: data parallelism on one host.

Each engine is a process with a whole model, a scheduler and a cache of its own; they know nothing of each
other. A request goes to one of them (:mod:`headrace_engine.clients.balancing`), a control call to all
(:mod:`headrace_engine.clients.replica_calls`).

An engine that ends fails its own requests, and is replaced by a new process while the others serve. It is
not if that could not bring back what it was: its weights were changed since the start; or if it keeps
ending (:mod:`headrace_engine.clients.replacing`). Engines may be added and taken away
(:mod:`headrace_engine.clients.scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.engine import EngineStats
from headrace_core.errors import EngineDead, RequestError
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_engine.clients.base import CoreClient, OutputSink, dead_again
from headrace_engine.clients.group import ReplicaGroup, not_now
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replacing import Replacer
from headrace_engine.clients.replica import Replica, ReplicaSink
from headrace_engine.clients.replica_calls import ReplicaCalls
from headrace_engine.clients.scaling import CheckRoom, Scaler
from headrace_engine.messages import CoreOutputs
from headrace_engine.startup import StartupTimeline


class ReplicatedClient(CoreClient):
    """A core that is several engines.

    Args:
        make: a client of engine i, not yet started; called again for its replacement.
        num_engines: at least 1.
        timeline: to continue one that has begun before; default: a new one.
        follows_prefixes: engines keep the blocks of prompts that have ended.
        check_room: whether the machine has room for more; None: the number of engines is fixed.
    """

    def __init__(
        self,
        make: Callable[[int], ProcessClient],
        num_engines: int,
        timeline: StartupTimeline | None = None,
        *,
        follows_prefixes: bool = True,
        check_room: CheckRoom | None = None,
    ) -> None:
        self.timeline = timeline or StartupTimeline()
        self._group = ReplicaGroup(make, num_engines, follows_prefixes=follows_prefixes)
        self._calls = ReplicaCalls(self._group)
        self._replacer = Replacer(self._group, self._start_process)
        self._scaler = Scaler(self._group, self._start_process, check_room)

    @property
    def pids(self) -> list[int | None]:
        """Process ids by engine; None: it does not run."""
        return [replica.client.pid if replica.runs else None for replica in self._group.replicas]

    def start(self, sink: OutputSink) -> None:
        group, replicas = self._group, self._group.replicas
        group.sink = sink
        with self.timeline.phase(f"start {len(replicas)} engine{'s' * (len(replicas) > 1)}"):
            try:
                group.start(replicas, lambda one: self._start_process(one, one.client))
            except BaseException:
                group.closing = True
                raise
        self.timeline.finish()
        clients = [replica.client for replica in replicas]
        self.max_model_len = min(client.max_model_len for client in clients)
        self.step_seconds = max(client.step_seconds for client in clients)
        plan = clients[0].memory_plan
        several = f"each of {len(clients)} engines: " if len(clients) > 1 else ""
        self.memory_plan = f"{several}{plan}" if plan else ""

    def _start_process(self, replica: Replica, client: ProcessClient) -> None:
        client.start(ReplicaSink(self, replica, client))

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
                        raise not_now(f"engine {replica.index} takes no requests") from error
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
        group, chosen = self._group, dict[int, list[CoreRequest]]()
        with group.lock:
            if group.closing:
                raise EngineDead("the engine is shut down")
            if group.failure is not None:
                raise dead_again(group.failure)
            replicas = group.replicas
            running = [one.index for one in replicas
                       if one.takes_requests and one.index not in tried]  # fmt: skip
            allowed = [self._allowed(request, running) for request in requests]
            for request, engines in zip(requests, allowed, strict=True):
                engine = group.placements.place(request, engines)
                chosen.setdefault(engine, []).append(request)
            return [(replicas[index], replicas[index].client, placed)
                    for index, placed in chosen.items()]  # fmt: skip

    def _allowed(self, request: CoreRequest, running: Sequence[int]) -> Sequence[int]:
        rank, count = request.data_parallel_rank, len(self._group.replicas)
        if rank is None:
            if running:
                return running
            raise not_now("no engine runs: all are being replaced, or take no requests")
        if not 0 <= rank < count:
            raise RequestError(
                f"data_parallel_rank = {rank}: must be in 0..{count - 1}, the number of an engine",
                param="data_parallel_rank",
            )
        if rank not in running:
            what = "leaves" if self._group.replicas[rank].leaves else "has ended"
            raise not_now(f"engine {rank} {what}; requests that name no engine go to another")
        return (rank,)

    def _taken_back(self, requests: Sequence[CoreRequest]) -> list[CoreRequest]:
        """Of requests that an engine did not take: those that were not failed with it already."""
        with self._group.lock:
            forget = self._group.placements.forget
            return [request for request in requests if forget(request.request_id)]

    def _by_client(
        self, request_ids: Sequence[str], *, forget: bool = False
    ) -> list[tuple[ProcessClient, list[str]]]:
        group = self._group
        with group.lock:
            found = group.placements.by_engine(request_ids, forget=forget)
            return [(group.replicas[index].client, ids) for index, ids in found.items()]

    def abort(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_client(request_ids, forget=True):
            client.abort(ids)

    def suspend(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_client(request_ids):
            client.suspend(ids)

    def resume(self, request_ids: Sequence[str]) -> None:
        for client, ids in self._by_client(request_ids):
            client.resume(ids)

    # Control calls.

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        """See :meth:`ReplicaCalls.stats`."""
        return self._calls.stats(drain)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        return self._calls.reset_prefix_cache(reset_running_requests)

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        return self._calls.add_lora(request)

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        return self._calls.remove_lora(lora_int_id)

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        return self._calls.list_loras()

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """See :meth:`ReplicaCalls.call_workers`."""
        return self._calls.call_workers(method, args)

    @property
    def num_engines(self) -> int:
        return len(self._group.replicas)

    def scale(self, num_engines: int, drain_timeout: float) -> Future[int]:
        """See :meth:`Scaler.scale`."""
        return self._scaler.scale(num_engines, drain_timeout)

    # Health.

    @property
    def ailments(self) -> list[str]:
        """What is wrong with engines that do not run, one text for each."""
        return self._group.ailments

    def trouble(self, limit: float) -> str | None:
        """An engine that is being replaced is none: the others serve."""
        for replica in self._group.replicas:
            if replica.leaves:
                continue
            if not replica.runs and replica.replacement is None:
                return str(replica)
            stuck = replica.client.trouble(limit) if replica.runs else None
            if stuck is not None:
                return f"engine {replica.index}: {stuck}"
        return None

    @property
    def heartbeat_age(self) -> float:
        return max(
            (one.client.heartbeat_age for one in self._group.replicas if one.runs), default=0.0
        )

    @property
    def failure(self) -> BaseException | None:
        return self._group.failure

    def shutdown(self) -> None:
        group = self._group
        with group.lock:
            if group.closing:
                return
            group.closing = True
            threads = [one.replacement for one in group.replicas if one.replacement is not None]
        self._scaler.stop()
        group.end(group.replicas, threads)

    # From the readers' threads.

    def take_outputs(self, outputs: CoreOutputs) -> None:
        """Note how far requests are, and pass their outputs on."""
        with self._group.lock:
            for output in outputs.outputs:
                self._group.placements.note(output)
            self._group.placements.note_tokens(outputs.tokens)
        self._group.publish(outputs)

    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None:
        """A process of an engine has ended."""
        self._replacer.lose(replica, client, error)
