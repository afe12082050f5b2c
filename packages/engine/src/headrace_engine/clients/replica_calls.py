"""Control calls of several engines: made to all that run, with one result."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.engine import EngineStats
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_engine.clients.base import dead_again
from headrace_engine.clients.gathered import failed_call, gathered_calls, summed_stats
from headrace_engine.clients.group import ReplicaGroup, not_now
from headrace_engine.clients.shared_state import READING_CALLS
from headrace_engine.weights.updates import CALLS as UPDATE_CALLS

BETWEEN_REQUESTS = ("sleep", "reload_weights")
"""Calls that an engine refuses while a request runs: it must be refused by all, or by none."""


class ReplicaCalls:
    """Control calls to the engines of a group; see :class:`~headrace_engine.clients.base.CoreClient`."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group

    def stats(self, drain: bool = False) -> Future[EngineStats]:
        """Sums, with each engine's own numbers in :attr:`EngineStats.by_engine`; those of one that does not
        run are zeros, with the reason."""
        group = self._group
        with group.lock:
            ended = {one.index: str(one) for one in group.replicas if not one.runs}
            if group.failure is not None:
                return failed_call(dead_again(group.failure))
            asked = {one.index: one.client.stats(drain) for one in group.replicas if one.runs}
            scaling_to = group.scaling_to or 0
        indices = list(asked)

        def merged(found: list[EngineStats | BaseException]) -> EngineStats:
            by_engine = {index: EngineStats(ended=why) for index, why in ended.items()}
            for index, stats in zip(indices, found, strict=True):
                if isinstance(stats, BaseException):
                    stats = EngineStats(ended=f"engine {index}: {stats}")
                by_engine[index] = stats
            total = summed_stats([by_engine[index] for index in sorted(by_engine)])
            total.scaling_to = scaling_to
            return total

        return gathered_calls(list(asked.values()), merged, errors=True)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> Future[bool]:
        with self._group.lock:
            self._group.placements.balancer.forget_prefixes()
        clients = self._group.running()
        return gathered_calls(
            [client.reset_prefix_cache(reset_running_requests) for client in clients], all
        )

    def add_lora(self, request: LoRARequest) -> Future[bool]:
        group, loras = self._group, self._group.state.loras
        with group.lock:
            clients, before = group.running(), loras.get(request.lora_int_id)
            loras[request.lora_int_id] = request
            calls = [client.add_lora(request) for client in clients]

        def merged(results: list[Any]) -> bool:
            failures = [result for result in results if isinstance(result, BaseException)]
            if not failures:
                return all(results)
            with group.lock:
                group.state.take_back(request, before)
            for client, result in zip(clients, results, strict=True):
                if result is True:
                    client.remove_lora(request.lora_int_id)
            raise failures[0]

        return gathered_calls(calls, merged, errors=True)

    def remove_lora(self, lora_int_id: int) -> Future[bool]:
        with self._group.lock:
            self._group.state.loras.pop(lora_int_id, None)
            clients = self._group.running()
            return gathered_calls([client.remove_lora(lora_int_id) for client in clients], any)

    def list_loras(self) -> Future[tuple[LoRARequest, ...]]:
        return self._group.running()[0].list_loras()

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """Results of all engines' workers, engine 0 first.

        Raises:
            UnsupportedFeature: the call joins workers in a group, and each of several engines has a rank 0.
            RequestError: a request runs, and the call must be obeyed by all engines or none.
            GenerateError: an engine does not run, and the call changes it.
        """
        group = self._group
        if method in UPDATE_CALLS and len(group.replicas) > 1:
            raise UnsupportedFeature(
                f"{method}: not with data_parallel_size = {len(group.replicas)}: new weights would have to "
                "reach each engine's ranks; reload_weights works, from files, and swap_weights unless "
                "engines share experts",
                param="method",
            )
        with group.lock:
            clients = group.running()
            if method in READING_CALLS:
                return gathered_calls(
                    [one.call_workers(method, args) for one in clients], _in_a_row
                )
            self._check_reaches_all(method)
            state = group.state
            before = state.sleep, state.changed
            group.placements.balancer.forget_prefixes()
            state.note_call(method, args)
            noted = state.sleep, state.changed
            calls = [client.call_workers(method, args) for client in clients]

        def merged(results: list[Any]) -> list[Any]:
            failures = [result for result in results if isinstance(result, BaseException)]
            if not failures:
                return _in_a_row(results)
            refused = all(isinstance(result, RequestError) for result in results)
            with group.lock:
                if refused and (state.sleep, state.changed) == noted:  # nothing has changed
                    state.sleep, state.changed = before
            raise failures[0]

        return gathered_calls(calls, merged, errors=True)

    def _check_reaches_all(self, method: str) -> None:
        ailments, scaling_to = self._group.ailments, self._group.scaling_to
        if scaling_to is not None:
            raise not_now(f"{method}: must wait until the engines have been scaled to {scaling_to}")
        if ailments:
            raise not_now(f"{method}: must reach all engines: {'; '.join(ailments)}")
        if method in BETWEEN_REQUESTS and self._group.placements.requests:
            raise RequestError(
                f"method = {method!r}: must wait until no request runs: pause first",
                param="method",
            )


def _in_a_row(results: Sequence[Sequence[Any]]) -> list[Any]:
    return [value for each in results for value in each]
