"""Several engines behind one front: which there are, which of them run, what they were told and compute."""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence

from headrace_core.errors import EngineDead, GenerateError
from headrace_engine.clients.base import OutputSink, dead_again
from headrace_engine.clients.placements import Placements
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replica import Replica
from headrace_engine.clients.shared_state import SharedState
from headrace_engine.messages import CoreOutputs

POLL_SECONDS = 0.1


class ReplicaGroup:
    """The engines of one front, and what they have in common.

    Args:
        make: a client of engine i, not yet started; called again for its replacement, and for engines that
            are added.
        num_engines: at least 1.
        follows_prefixes: engines keep the blocks of prompts that have ended.
    """

    def __init__(
        self, make: Callable[[int], ProcessClient], num_engines: int, *, follows_prefixes: bool
    ) -> None:
        self.make = make
        self.replicas: Sequence[Replica] = [
            Replica(index, make(index)) for index in range(num_engines)
        ]
        """In order. Another list takes its place when engines come or go: this one never changes."""
        self.lock = threading.RLock()
        """Guards everything below, and which replicas there are and run."""
        self.placements = Placements(num_engines, follows_prefixes=follows_prefixes)
        self.state = SharedState(self.lock)
        self.failure: BaseException | None = None
        """Why no engine will run again."""
        self.scaling_to: int | None = None
        """Number of engines that there will be; None: as many as there are."""
        self.closing = False
        self.sink: OutputSink | None = None
        """Gets outputs and the death of all."""
        self._context = contextvars.copy_context()

    @property
    def ailments(self) -> list[str]:
        """What is wrong with engines that do not run, one text for each."""
        return [str(replica) for replica in self.replicas if not replica.runs]

    def running(self) -> list[ProcessClient]:
        """Clients of engines that run, and do not leave.

        Raises:
            GenerateError: none does now.
            EngineDead: none will again.
        """
        with self.lock:
            if self.failure is not None:
                raise dead_again(self.failure)
            clients = [replica.client for replica in self.replicas if replica.takes_requests]
            if not clients:
                raise not_now("no engine runs: " + "; ".join(self.ailments))
            return clients

    def nothing_left(self) -> bool:
        """True if no engine runs, and none will."""
        return all(not one.runs and one.replacement is None for one in self.replicas)

    def give_up(self, error: BaseException) -> None:
        """The last engine has ended."""
        self.failure = EngineDead(f"all engines have ended: {'; '.join(self.ailments)}")
        self.failure.__cause__ = error
        if self.sink is not None:
            self.sink.on_death(self.failure)

    def publish(self, outputs: CoreOutputs) -> None:
        """Pass outputs on."""
        if self.sink is not None:
            self.sink.on_outputs(outputs)

    def thread(self, work: Callable[[Replica], None], replica: Replica) -> threading.Thread:
        """Start a thread for work on an engine."""
        return self.spawn(f"headrace-engine-{replica.index}-start", lambda: work(replica))

    def spawn(self, name: str, work: Callable[[], None]) -> threading.Thread:
        """Start a thread, in the context in which the group was made."""
        run = self._context.copy().run
        thread = threading.Thread(target=run, args=(work,), name=name, daemon=True)
        thread.start()
        return thread

    def start(self, replicas: Sequence[Replica], start: Callable[[Replica], None]) -> None:
        """Start engines, all at once; one that cannot start ends the others.

        Args:
            start: starts one.
        """
        errors: list[BaseException] = []

        def begin(replica: Replica) -> None:
            try:
                start(replica)
            except BaseException as error:
                errors.append(error)

        threads = [self.thread(begin, replica) for replica in replicas]
        try:
            while any(thread.is_alive() for thread in threads) and not errors:
                for thread in threads:
                    thread.join(POLL_SECONDS)
            if errors:
                raise errors[0]
        except BaseException:
            with self.lock:
                for replica in replicas:
                    replica.failure = replica.failure or "it is ended"
            self.end(replicas, threads)
            raise

    def end(self, replicas: Sequence[Replica], threads: Sequence[threading.Thread] = ()) -> None:
        """End engines, those too that are starting in ``threads``."""
        while any(thread.is_alive() for thread in threads):
            for replica in replicas:
                if not replica.client.has_started:
                    replica.client.kill()
            for thread in threads:
                thread.join(POLL_SECONDS)
        if sys.is_finalizing():  # nobody has closed the engine, and a thread would never begin
            for replica in replicas:
                replica.client.shutdown()
            return
        ends = [self.thread(lambda one: one.client.shutdown(), one) for one in replicas]
        for thread in ends:
            thread.join()


def not_now(message: str) -> GenerateError:
    """The error of a request that may succeed later."""
    error = GenerateError(message)
    error.is_public = True
    return error
