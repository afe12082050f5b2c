"""What happens when one of several engines ends: its requests fail, and a new process takes its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace_engine.clients.group import ReplicaGroup
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replica import Replica
from headrace_engine.messages import CoreOutput, CoreOutputs

logger = logging.getLogger(__name__)


class Replacer:
    """Replaces engines of a group that end.

    Args:
        start: starts a client of an engine, whose outputs and end reach the group.
    """

    def __init__(
        self, group: ReplicaGroup, start: Callable[[Replica, ProcessClient], None]
    ) -> None:
        self._group = group
        self._start = start

    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None:
        """A process of an engine has ended: fail its requests, and replace it. Whoever starts a
        replacement notices the end of that one itself."""
        group = self._group
        with group.lock:
            if group.closing or replica.client is not client or not replica.runs:
                return
            lost = group.placements.lose(replica.index)
            replica.failure = str(error)
            why_not = group.state.why_not_repeated() or replica.fell(time.monotonic())
            if why_not is None:
                replica.replacement = group.thread(self.replace, replica)
            else:
                replica.failure += f" ({why_not})"
            nothing_left = group.nothing_left()
        logger.error("%s; %d of its requests failed", replica, len(lost))
        # What a core said of its own error stays in the log.
        cause = str(error) if error.__cause__ is None else "the engine process failed"
        message = f"engine {replica.index}: {cause}"
        failed = [
            CoreOutput(one, finish_reason="error", error=message, engine_ended=True) for one in lost
        ]
        if failed:
            group.publish(CoreOutputs(failed, time.monotonic()))
        if nothing_left:
            group.give_up(error)

    def replace(self, replica: Replica) -> None:
        """Start processes of an engine until one runs and is where the others are, or too many failed."""
        group, ended = self._group, replica.failure
        while True:
            if replica.client.has_started:
                replica.client.shutdown()
            try:
                client = group.make(replica.index)
                with group.lock:
                    if group.closing:
                        return
                    replica.client = client
                self._start(replica, client)
                group.state.repeat_on(client, f"engine {replica.index}", replica.runs_again)
                logger.info("engine %d runs again", replica.index)
                return
            except BaseException as error:
                with group.lock:
                    if group.closing:
                        return
                    why_not = group.state.why_not_repeated()
                    why_not = why_not or replica.failed_to_start(time.monotonic())
                    replica.failure = f"{ended} (its replacement: {error})"
                    if why_not is not None:
                        replica.failure += f" ({why_not})"
                        replica.replacement = None
                    nothing_left = group.nothing_left()
                logger.error("%s", replica)
                if why_not is None:
                    continue
                if replica.client.has_started:
                    replica.client.shutdown()
                if nothing_left:
                    group.give_up(error)
                return
