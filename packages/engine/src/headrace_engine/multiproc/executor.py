"""The executor ``mp``: rank 0 in this process, every other rank in one of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from headrace_core.errors import CaptureRefused, EngineDead, ReplayFailed, UnsupportedFeature
from headrace_core.executor import Worker, WorkerFactory
from headrace_engine.lockstep.turns import TAKE_LEAVE, TAKE_PART
from headrace_engine.multiproc.leader import PassLeader
from headrace_engine.multiproc.nodes.listener import gather
from headrace_engine.multiproc.places import RankedWorkers, Rendezvous
from headrace_engine.multiproc.rank_process import CALLS
from headrace_engine.multiproc.rank_processes import RankProcesses
from headrace_engine.uniproc import UniProcExecutor
from headrace_engine.weights.led_calls import LED as LED_CHANGES
from headrace_engine.weights.led_calls import LED_BESIDE

logger = logging.getLogger(__name__)

LED = {"profile": "begin_profile", "warm_up": ""}
"""Calls whose passes rank 0 leads: the others follow its passes, then get the call. Before it they get the
one that stands here, if one does."""
OWN = ("start_profile", "stop_profile", TAKE_PART, TAKE_LEAVE, *LED_CHANGES)
"""Calls that are of rank 0 only: a recording is of its steps, and it leads passes and changes of weights."""
STEPWISE = {"reload_weights": (("read_weights", True), ("restore_cache",), ("warm_up",))}
"""Calls that several of all ranks stand for, one after the other, as rank 0 leads passes in some."""
JOIN_SECONDS = 10.0
"""Longest wait for rank 0's thread at the end: it may be in an exchange with a rank that does not come."""


class MultiProcExecutor(UniProcExecutor):
    """Runs rank 0's worker as :class:`UniProcExecutor` does, and starts a process for each other rank.

    Steps go to rank 0 only, whose passes of the model run on every rank. When a rank ends, or a pass
    raises, the ranks are no longer in step: :attr:`failure` says why, and whoever waits for a step or a
    call gets that at once.

    An engine that shares experts with others is of this kind, too, even with one rank: a pass that raises
    ends it.

    Args:
        worker_factory: a :class:`RankedWorkers`; any other one makes an engine of one rank.
    """

    def __init__(self, worker_factory: WorkerFactory) -> None:
        super().__init__(worker_factory)
        self._others: RankProcesses | None = None
        self._outstanding: set[Future[Any]] = set()
        self._meeting: Rendezvous | None = None
        """Where the communicator's ranks meet, until they have."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks."""
        return [] if self._others is None else self._others.pids

    def start(self) -> None:
        """Start the processes and make every rank's worker; raises what that raises, with nothing left
        behind."""
        ranked = self.worker_factory
        if not isinstance(ranked, RankedWorkers) or not (ranked.world_size > 1 or ranked.peers):
            super().start()
            return
        self._meeting = None if ranked.meet is None else ranked.meet()
        try:
            meeting = self._meeting
            rendezvous = {} if meeting is None else {n: meeting.address(n) for n in ranked.groups}
            if ranked.peers is not None:
                rendezvous |= ranked.peers.meet(meeting)
            nodes = gather(ranked, rendezvous)
            self._others = others = RankProcesses(ranked, rendezvous, self._rank_died, nodes)
            leader = PassLeader(others.run_pass, self._broken, others.call, others.expect_pass)
            self.worker_factory = partial(ranked.make, ranked.place(0, rendezvous), leader)
            super().start()
            others.wait_started()
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Run a worker method on every rank, after what is queued, and wait: results by rank.

        Raises:
            UnsupportedFeature: it is a function, which other processes are not given; or a method that
                the other ranks do not have.
            EngineDead: the executor is not running, or a rank has ended.
            BaseException: the method's own, of the lowest rank that raised.
        """
        others = self._others
        if others is None:
            return super().call(method, *args)
        if not isinstance(method, str):
            raise UnsupportedFeature(
                "a function for the workers: cannot be sent to other processes, where ranks are while "
                "tensor_parallel_size or pipeline_parallel_size is above 1; name a method"
            )
        if method in OWN:
            return super().call(method, *args)
        if method in STEPWISE:
            first, *_ = [self.call(*one) for one in STEPWISE[method]]
            return first
        if method not in CALLS:
            raise UnsupportedFeature(
                f"{method}: not while tensor_parallel_size or pipeline_parallel_size is above 1, or engines "
                f"share experts; ranks in other processes do {', '.join((*CALLS, *STEPWISE))} only"
            )
        results: list[Any] = self._queue(
            partial(_on_every_rank, others, method, args), is_step=False
        ).result()
        if method == "load":  # in which every rank joins
            self._have_met()
        return results

    def call_beside(self, method: str, *args: Any) -> Future[list[Any]]:
        """As :meth:`UniProcExecutor.call_beside`: of rank 0, which leads the others.

        Raises:
            UnsupportedFeature: there are several ranks, and this is no such method.
        """
        if self._others is not None and method not in LED_BESIDE:
            raise UnsupportedFeature(
                f"{method}: not while tensor_parallel_size or pipeline_parallel_size is above 1"
            )
        return super().call_beside(method, *args)

    def ask_others(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of each other rank's worker that is made to run beside passes; results by rank from
        1. Any thread.

        Raises:
            EngineDead: a rank has ended.
        """
        return [] if self._others is None else self._others.call(method, args)

    def shutdown(self) -> None:
        """As :meth:`UniProcExecutor.shutdown`; then end the other ranks' processes."""
        if self._others is not None and self._failure is not None:
            self._others.kill(self._failure)  # first, as rank 0 may wait for them
        super().shutdown()
        if self._others is not None:
            self._end_exchange(self._others)
            self._others.stop()
        self._have_met()

    def _have_met(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.close()

    def _end_exchange(self, others: RankProcesses) -> None:
        """Rank 0 may still wait for a rank that does not come (a stopped process): it waits for the end of
        that, too."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            return
        if self._failure is None:
            logger.warning("rank 0 is still in a step %g s after the end; it ends", JOIN_SECONDS)
        others.kill(self._failure)
        thread.join(JOIN_SECONDS)

    def _join_seconds(self) -> float | None:
        return None if self._others is None else JOIN_SECONDS

    def _queue(self, run: Callable[[Worker], Any], *, is_step: bool) -> Future[Any]:
        future = super()._queue(run, is_step=is_step)
        if self._others is not None:
            self._outstanding.add(future)
            future.add_done_callback(self._outstanding.discard)
            if self._failure is not None:  # meanwhile
                _fail(future, self._failure)
        return future

    def _broken(self, error: BaseException) -> BaseException:
        """Rank 0 failed in a pass. What is returned is no error that a step handles by itself."""
        assert self._others is not None
        cause = self._others.cause_of(error)
        if isinstance(cause, CaptureRefused | ReplayFailed):
            cause = EngineDead(f"rank 0 (process {os.getpid()}) failed in a captured step: {cause}")
        if self._failure is None:
            self._end(cause)
        return cause

    def _rank_died(self, error: EngineDead) -> None:
        logger.error("%s", error)
        self._end(error)
        meeting = self._meeting
        if meeting is not None:  # where rank 0 may wait for it
            meeting.give_up()
        for future in list(self._outstanding):
            _fail(future, error)


def _on_every_rank(
    others: RankProcesses, method: str, args: tuple[Any, ...], worker: Worker
) -> list[Any]:
    if method not in LED:
        answers = others.call(method, args)
        own = getattr(worker, method)(*args)
        return [own, *[answer.result() for answer in answers]]
    if LED[method]:
        others.call(LED[method], ())
    own = getattr(worker, method)(*args)
    return [own, *[answer.result() for answer in others.call(method, args)]]


def _fail(future: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(Exception):  # it has ended
        future.set_exception(error)
