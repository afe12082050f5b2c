"""Several engines that share the experts of one model: they start, run and end together."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.errors import EngineDead
from headrace_engine.clients.base import OutputSink
from headrace_engine.clients.group import ReplicaGroup
from headrace_engine.clients.process import ProcessClient, describe_status
from headrace_engine.clients.replica import Replica
from headrace_engine.clients.replicas import ReplicatedClient
from headrace_engine.lockstep.peers import EnginePlace
from headrace_engine.lockstep.relay import EngineRelay
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_engine.startup import StartupTimeline

logger = logging.getLogger(__name__)

CAUSE_SECONDS = 1.0
"""Longest wait for the process that ended first, when an engine says that another one is gone."""
POLL_SECONDS = 0.02
LEFT = describe_status(0)
"""End of a process that left by itself."""


class GroupedClient(ReplicatedClient):
    """A core that is several engines with experts in common.

    When one ends, so do all: the others lack its experts, and would wait for it in the next pass. None is
    replaced.

    Args:
        make: a client of an engine, given its number and its place among them.
        num_engines: at least 2.
        timeline: as :class:`ReplicatedClient`'s.
        follows_prefixes: likewise.
    """

    def __init__(
        self,
        make: Callable[[int, EnginePlace], ProcessClient],
        num_engines: int,
        timeline: StartupTimeline | None = None,
        *,
        follows_prefixes: bool = True,
    ) -> None:
        self._relay = relay = EngineRelay(num_engines)
        try:
            super().__init__(
                lambda index: make(index, EnginePlace(index, num_engines, relay.path)),
                num_engines,
                timeline,
                follows_prefixes=follows_prefixes,
            )
        except BaseException:
            relay.close()
            raise

    def start(self, sink: OutputSink) -> None:
        try:
            super().start(sink)
        except BaseException:
            self._relay.close()
            raise

    def call_workers(self, method: str, args: Sequence[Any] = ()) -> Future[list[Any]]:
        """See :meth:`ReplicaCalls.call_workers`. Engines wait for each other in some calls: all get them
        before any is told to end.

        Raises:
            EngineDead: they are told to end.
        """
        with self._group.lock:
            if self._group.closing:
                raise EngineDead("the engine is shut down")
            return super().call_workers(method, args)

    def shutdown(self) -> None:
        if (
            sys.is_finalizing()
        ):  # engines are ended one by one then, and each would wait for the others
            for replica in self._group.replicas:
                replica.client.kill()
        super().shutdown()
        self._relay.close()

    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None:
        """An engine has ended: fail all requests, and end the others."""
        group = self._group
        with group.lock:
            if _is_over(group) or not replica.runs:
                return
            replica.failure = str(error)
        first, error = _ended_first(group, replica, error)
        with group.lock:
            if _is_over(group):
                return
            failure = EngineDead(
                f"engine {first.index}: {error}; engines that share experts end together"
            )
            failure.__cause__ = error
            group.failure = failure
            for other in group.replicas:
                other.failure = other.failure or f"ended with engine {first.index}"
            lost = [one for other in group.replicas for one in group.placements.lose(other.index)]
        logger.error("%s; %d requests failed", failure, len(lost))
        for other in group.replicas:
            other.client.kill()
        _report(group, lost, failure)


def _is_over(group: ReplicaGroup) -> bool:
    """True if the group has ended, or is told to."""
    return group.closing or group.failure is not None


def _report(group: ReplicaGroup, lost: list[str], failure: EngineDead) -> None:
    """Fail the requests that were under way, and say that no engine will run again."""
    failed = [
        CoreOutput(one, finish_reason="error", error=str(failure), engine_ended=True)
        for one in lost
    ]
    if failed:
        group.publish(CoreOutputs(failed, time.monotonic()))
    if group.sink is not None:
        group.sink.on_death(failure)


def _ended_first(
    group: ReplicaGroup, replica: Replica, error: BaseException
) -> tuple[Replica, BaseException]:
    """The engine whose end was the cause of the others': one may say that it misses another one before that
    one's end is known here. One that left by itself has said why, as this one did, and later."""
    if error.__cause__ is None:  # the process itself was seen to end
        return replica, error
    others = [other for other in group.replicas if other is not replica]
    deadline = time.monotonic() + CAUSE_SECONDS
    while time.monotonic() < deadline:
        ends = [(other, other.client.how_ended) for other in others]
        for other, how in ends:
            if how is not None and how != LEFT:
                return other, EngineDead(f"the engine process ended ({how})")
        if all(how == LEFT for _, how in ends):
            break
        time.sleep(POLL_SECONDS)
    return replica, error
