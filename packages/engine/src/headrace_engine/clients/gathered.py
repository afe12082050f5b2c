"""One result of calls of several engines, and their statistics as those of one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from headrace_core.engine import EngineStats

T = TypeVar("T")


def failed_call(error: BaseException) -> Future[Any]:
    """A call that has failed."""
    future = Future[Any]()
    future.set_exception(error)
    return future


def gathered_calls(
    calls: Sequence[Future[Any]], merge: Callable[[list[Any]], T], *, errors: bool = False
) -> Future[T]:
    """The merged results of calls, in their order; the first error if one failed.

    Args:
        errors: ``merge`` gets the errors in place of results, and raises what is to be raised.
    """
    gathered: Future[T] = Future()
    left, lock = [len(calls)], threading.Lock()

    def settle(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        if not gathered.set_running_or_notify_cancel():
            return
        results = [call.exception() or call.result() for call in calls]
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures and not errors:
            gathered.set_exception(failures[0])
            return
        try:
            gathered.set_result(merge(results))
        except BaseException as error:
            gathered.set_exception(error)

    for call in calls:
        call.add_done_callback(settle)
    if not calls:
        gathered.set_result(merge([]))
    return gathered


SUMMED = (
    "num_requests_running", "num_requests_waiting", "num_requests_suspended", "num_blocks",
    "num_free_blocks", "prompt_tokens", "generation_tokens", "num_preemptions",
    "prefix_cache_queries", "prefix_cache_hits", "num_steps", "iteration_tokens", "num_drafts",
    "num_draft_tokens",
)  # fmt: skip
"""Numbers of engines that are added up."""


def summed_stats(engines: Sequence[EngineStats]) -> EngineStats:
    """Statistics of several engines as those of one, with their own beside them.

    Args:
        engines: in order; those that have ended count for nothing but their sums.
    """
    alive = [stats for stats in engines if not stats.ended]
    blocks = sum(stats.num_blocks for stats in alive)
    usage = sum(stats.kv_cache_usage * stats.num_blocks for stats in alive)
    versions = {stats.weights_version for stats in alive}
    positions = max((len(stats.num_accepted_per_position) for stats in alive), default=0)
    total = EngineStats(
        **{name: sum(getattr(stats, name) for stats in alive) for name in SUMMED},
        kv_cache_usage=usage / blocks if blocks else 0.0,
        block_size=max((stats.block_size for stats in alive), default=0),
        step_tokens=[count for stats in alive for count in stats.step_tokens],
        heartbeat_age=max((stats.heartbeat_age for stats in alive), default=0.0),
        num_accepted_per_position=[
            sum(stats.num_accepted_per_position[place] for stats in alive
                if place < len(stats.num_accepted_per_position))
            for place in range(positions)
        ],
        sleep_level=max((stats.sleep_level for stats in alive), default=0),
        weights_version=versions.pop() if len(versions) == 1 else "",
    )  # fmt: skip
    for stats in alive:
        for into, counts in ((total.running_loras, stats.running_loras),
                             (total.waiting_loras, stats.waiting_loras),
                             (total.kv_transfer, stats.kv_transfer)):  # fmt: skip
            for name, count in counts.items():
                into[name] = into.get(name, 0) + count
    return dataclasses.replace(total, by_engine=list(engines))
