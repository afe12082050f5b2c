"""More or fewer engines of a group, while it serves.

New engines start beside those that serve, read the adapters that these have, and join all at once; if one
cannot, none does. Engines that leave, those with the highest numbers, take no new requests, finish what they
have, and end.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from headrace_core.errors import EngineDead, GenerateError, RequestError, UnsupportedFeature
from headrace_engine.clients.base import CONTROL_TIMEOUT, dead_again
from headrace_engine.clients.group import ReplicaGroup, not_now
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replica import Replica
from headrace_engine.messages import CoreOutput, CoreOutputs

logger = logging.getLogger(__name__)

FIELD = "new_data_parallel_size"
CheckRoom = Callable[[int, Sequence[Mapping[str, Any]]], None]
"""Gets a number of engines and the reports of the workers that run; raises RequestError if so many do not fit
on the machine."""


class Scaler:
    """Changes the number of a group's engines.

    Args:
        start: starts a client of an engine, whose outputs and end reach the group.
        check_room: whether the machine has room; None: the number of engines stays as it is.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        start: Callable[[Replica, ProcessClient], None],
        check_room: CheckRoom | None,
    ) -> None:
        self._group = group
        self._start = start
        self._check_room = check_room
        self._joining: Sequence[Replica] = ()
        self._thread: threading.Thread | None = None

    def scale(self, num_engines: int, drain_timeout: float) -> Future[int]:
        """Have so many engines; see :meth:`headrace_core.engine.EngineClient.scale_elastic_ep`. A future
        that cannot be cancelled: what has begun is brought to its end.

        Raises: as there, where it can be told at once.
        """
        group, done = self._group, Future[int]()
        done.set_running_or_notify_cancel()
        with group.lock:
            self._check(num_engines, drain_timeout)
            if num_engines == len(group.replicas):
                done.set_result(0)
                return done
            group.scaling_to = num_engines
            for replica in group.replicas[num_engines:]:
                replica.leaves = True
            self._thread = group.spawn(
                "headrace-engines-scaling", lambda: self._run(num_engines, drain_timeout, done)
            )
        return done

    def stop(self) -> None:
        """End what is under way; the group is closing."""
        with self._group.lock:
            thread, joining = self._thread, self._joining
            self._group.placements.wake_waiting()
        while thread is not None and thread.is_alive():
            for replica in joining:
                replica.client.kill()
            thread.join(0.1)
            joining = self._joining

    def _check(self, num_engines: int, drain_timeout: float) -> None:
        """Refuse what cannot begin now."""
        group, count = self._group, len(self._group.replicas)
        if self._check_room is None:
            raise UnsupportedFeature(
                "scale_elastic_ep: the number of engines was fixed at the start (--no-enable-elastic-ep, or "
                "--enable-expert-parallel)", param=FIELD,
            )  # fmt: skip
        if group.closing:
            raise EngineDead("the engine is shut down")
        if group.failure is not None:
            raise dead_again(group.failure)
        if group.scaling_to is not None:
            raise not_now(
                f"scale_elastic_ep: the engines are being scaled to {group.scaling_to} already"
            )
        if num_engines < 1:
            raise RequestError(f"{FIELD} = {num_engines}: must be at least 1", param=FIELD)
        if not 0 <= drain_timeout < math.inf:
            raise RequestError(
                f"drain_timeout = {drain_timeout}: must be seconds, at least 0",
                param="drain_timeout",
            )
        ailing = [str(one) for one in group.replicas[:num_engines] if not one.runs]
        ailing += [str(one) for one in group.replicas[num_engines:] if one.replacement is not None]
        if ailing:
            raise not_now(f"scale_elastic_ep: must wait until engines run: {'; '.join(ailing)}")
        if num_engines > count:
            self._check_may_grow(num_engines, count)

    def _check_may_grow(self, num_engines: int, count: int) -> None:
        """Refuse engines that would not be like those that run."""
        group = self._group
        why_not = group.state.why_not_repeated()
        if why_not is not None:
            raise UnsupportedFeature(
                f"{FIELD} = {num_engines}: must be at most {count}: {why_not}", param=FIELD
            )
        if group.state.sleep is not None:
            raise RequestError(
                f"{FIELD} = {num_engines}: must be at most {count} while the engines sleep: wake them up "
                "first", param=FIELD,
            )  # fmt: skip

    def _run(self, num_engines: int, drain_timeout: float, done: Future[int]) -> None:
        group, count = self._group, len(self._group.replicas)
        ended, failure = 0, None
        try:
            if num_engines > count:
                self._grow(num_engines)
            else:
                ended = self._shrink(num_engines, drain_timeout)
        except BaseException as error:
            failure = error
        with group.lock:
            group.scaling_to, self._joining = None, ()
        if failure is not None:
            level = logging.INFO if group.closing else logging.ERROR
            logger.log(level, "scaling from %d to %d engines: %s", count, num_engines, failure)
            done.set_exception(failure)
        else:
            logger.info("%d engines serve, after %d", num_engines, count)
            done.set_result(ended)

    # More engines.

    def _grow(self, num_engines: int) -> None:
        """Start engines, and have them join once all are like the others."""
        group, count = self._group, len(self._group.replicas)
        assert self._check_room is not None
        self._check_room(num_engines, self._reports())
        joining = [Replica(index, group.make(index)) for index in range(count, num_engines)]
        for replica in joining:
            replica.failure = "it is starting"
        with group.lock:
            if group.closing:
                raise EngineDead("the engine is shut down")
            self._joining = joining
        try:
            group.start(joining, self._start_one)
            clients = {f"engine {one.index}": one.client for one in joining}
            group.state.repeat_on(clients, lambda: self._join(joining))
        except BaseException as error:
            group.end(joining)
            if group.closing:
                raise EngineDead("the engine is shut down") from error
            raise _failed_to_start(error, count) from error

    def _reports(self) -> list[Mapping[str, Any]]:
        """Reports of all workers."""
        try:
            calls = [one.call_workers("report") for one in self._group.running()]
            return [each for call in calls for each in call.result(CONTROL_TIMEOUT)]
        except (EngineDead, TimeoutError) as error:
            raise not_now(
                f"scale_elastic_ep: not all engines tell what they take: {error or 'no answer in time'}"
            ) from error

    def _start_one(self, replica: Replica) -> None:
        try:
            self._start(replica, replica.client)
            self._check_context(replica.client)
        except BaseException as error:
            error.add_note(f"engine {replica.index}")
            raise

    def _check_context(self, client: ProcessClient) -> None:
        """Refuse an engine that takes less than requests were promised."""
        promised = min(one.client.max_model_len for one in self._group.replicas)
        if client.max_model_len < promised:
            raise RequestError(
                f"it has room for contexts of {client.max_model_len} tokens, the others for {promised}",
                param=FIELD,
            )

    def _join(self, joining: Sequence[Replica]) -> None:
        """Engines take requests from now on; the lock is held."""
        group = self._group
        if group.closing:
            raise EngineDead("the engine is shut down")
        for replica in joining:
            replica.runs_again()
        group.replicas = [*group.replicas, *joining]
        group.placements.balancer.resize(len(group.replicas))

    # Fewer engines.

    def _shrink(self, num_engines: int, drain_timeout: float) -> int:
        """Have engines leave; returns the number of requests that did not end in time."""
        group, deadline = self._group, time.monotonic() + drain_timeout
        with group.lock:
            if group.closing:  # nobody would wake this thread
                raise EngineDead("the engine is shut down")
            leaving = group.replicas[num_engines:]
            empty = [group.placements.when_empty(replica.index) for replica in leaving]
        for each in empty:
            each.wait(max(0.0, deadline - time.monotonic()))
        ended = 0
        for replica in leaving:
            ended += self._end_requests(replica, drain_timeout)
        with group.lock:
            if group.closing:  # which ends all engines
                raise EngineDead("the engine is shut down")
            for replica in leaving:
                replica.failure = "it has left"
            group.replicas = group.replicas[:num_engines]
            group.placements.balancer.resize(num_engines)
            nothing_left = group.nothing_left()
        group.end(leaving)
        if nothing_left:
            group.give_up(EngineDead("the engines that were to stay have ended"))
        return ended

    def _end_requests(self, replica: Replica, drain_timeout: float) -> int:
        """End the requests that an engine still has."""
        group = self._group
        with group.lock:
            left = [] if group.closing else group.placements.lose(replica.index)
        if not left:
            return 0
        replica.client.abort(left)
        why = (
            f"engine {replica.index} leaves, and the request had not ended within drain_timeout = "
            f"{drain_timeout:g} s"
        )
        logger.warning("engine %d leaves; %d of its requests are ended", replica.index, len(left))
        group.publish(CoreOutputs(
            [CoreOutput(one, finish_reason="error", error=why, engine_ended=True) for one in left],
            time.monotonic(),
        ))  # fmt: skip
        return len(left)


def _failed_to_start(error: BaseException, count: int) -> GenerateError:
    """The error of a group that stays as it was."""
    name = next(iter(getattr(error, "__notes__", [])), "a new engine")
    number = "1 engine serves" if count == 1 else f"{count} engines serve"
    return GenerateError(f"scale_elastic_ep: {name} did not start: {error}; {number} on")
