"""Several engines that share the experts of one model: they start, run and end together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace_core.errors import EngineDead
from headrace_engine.clients.base import OutputSink
from headrace_engine.clients.process import ProcessClient
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

    def shutdown(self) -> None:
        super().shutdown()
        self._relay.close()

    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None:
        """An engine has ended: fail all requests and end the others."""
        with self._lock:
            if self._closing or self._failure is not None or not replica.runs:
                return
            replica.failure = str(error)
        first, error = self._ended_first(replica, error)
        cause = f"engine {first.index}: {error}"
        with self._lock:
            if self._closing or self._failure is not None:
                return
            self._failure = EngineDead(f"{cause}; engines that share experts end together")
            self._failure.__cause__ = error
            lost = list(self._placed)
            for request_id in lost:
                self._forget(request_id)
            for other in self._replicas:
                other.failure = other.failure or f"ended with engine {first.index}"
        logger.error("%s; %d requests failed", self._failure, len(lost))
        for other in self._replicas:
            other.client.kill()
        self._report_end(lost, self._failure)

    def _report_end(self, lost: list[str], failure: BaseException) -> None:
        if self._sink is None:
            return
        failed = [
            CoreOutput(one, finish_reason="error", error=str(failure), engine_ended=True)
            for one in lost
        ]
        if failed:
            self._sink.on_outputs(CoreOutputs(failed, time.monotonic()))
        self._sink.on_death(failure)

    def _ended_first(self, replica: Replica, error: BaseException) -> tuple[Replica, BaseException]:
        """The engine whose end was the cause of the others': one may say that it misses another one before
        that one's end is known here."""
        if error.__cause__ is None:  # the process itself was seen to end
            return replica, error
        deadline = time.monotonic() + CAUSE_SECONDS
        while time.monotonic() < deadline:
            for other in self._replicas:
                how = other.client.how_ended if other is not replica else None
                if how is not None:
                    return other, EngineDead(f"the engine process ended ({how})")
            time.sleep(POLL_SECONDS)
        return replica, error
