"""Ranks of a communicator in processes of their own, which a test sends functions to.

Functions and arguments travel by pickle between a test and its own children; nothing of a product does.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from headrace_core import plugins
from headrace_core.parallel import Communicator

COMMUNICATORS = "headrace.communicators"
HANG_SECONDS = 120
"""After so long without an answer a test fails."""


def from_file(path: str, name: str, *arguments: Any, **options: Any) -> Any:
    """Call a function of a file: what a test's own module has cannot be pickled, ``partial(from_file, ...)``
    can."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.get(spec.name)
    if module is None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # before others see it: they may be threads
        sys.modules[spec.name] = module
    return getattr(module, name)(*arguments, **options)


class RankFailed(Exception):
    """A function raised in a rank.

    Args:
        kind: name of the exception's class.
        message: its text.
        rank: its ``rank``, if it has one: whom it blames.
    """

    def __init__(self, kind: str, message: str, rank: int | None = None) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.rank = kind, message, rank


class RankProcesses:
    """Processes, each with the communicator of one rank; a context manager.

    Args:
        create: makes a rank's communicator: an entry point of ``headrace.communicators``, or a function
            that can be pickled, called with ``(rank, world_size, rendezvous)``.
        world_size: number of processes.
        rendezvous: the address given to each.
    """

    def __init__(
        self, create: str | Callable[..., Communicator], world_size: int, rendezvous: str
    ) -> None:
        # A server that has torch forks them: each import of it would take seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["headrace_testing.engine.communicators"])
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, create, rank, world_size, rendezvous), daemon=True
            )
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
        for rank in range(world_size):
            self.answer(rank)

    def begin(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a rank call ``function(communicator, *arguments)``: a function of a module."""
        self.connections[rank].send((function, arguments))

    def answer(self, rank: int) -> Any:
        """What the rank's function returned.

        Raises:
            RankFailed: what it raised.
        """
        found = self.outcome(rank)
        if isinstance(found, RankFailed):
            raise found
        return found

    def outcome(self, rank: int) -> Any:
        """What the rank's function returned, or a :class:`RankFailed`."""
        if not self.connections[rank].poll(HANG_SECONDS):
            raise AssertionError(f"rank {rank} gave no answer within {HANG_SECONDS} s")
        failure, result = self.connections[rank].recv()
        return RankFailed(*failure) if failure else result

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results by rank of a function that all ranks call at the same time."""
        ranks = range(len(self.connections))
        for rank in ranks:
            self.begin(rank, function, *arguments)
        found = [self.outcome(rank) for rank in ranks]
        for result in found:
            if isinstance(result, RankFailed):
                raise result
        return found

    def kill(self, rank: int) -> None:
        """``kill -9``, and wait for the end."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join(HANG_SECONDS)

    def close(self) -> None:
        """End all processes."""
        for connection in self.connections:
            connection.close()  # which is what they wait for
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(
    connection: Connection,
    create: str | Callable[..., Communicator],
    rank: int,
    world_size: int,
    rendezvous: str,
) -> None:
    torch.set_num_threads(1)
    group = None
    call: tuple[Callable[..., Any], Sequence[Any]] | None = None
    reply: tuple[Any, Any]
    while True:
        try:
            if group is None:
                make = plugins.load(COMMUNICATORS, create) if isinstance(create, str) else create
                group = make(rank, world_size, rendezvous)
                reply = (None, None)
            else:
                assert call is not None
                function, arguments = call
                reply = (None, function(group, *arguments))
        except Exception as error:
            blamed = getattr(error, "rank", None)
            reply = ((type(error).__name__, str(error), blamed), None)
        try:
            connection.send(reply)
            call = connection.recv()
        except (EOFError, OSError):
            return
