"""Rank 0's hold on the process of another rank: a child, or a process of another host."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Protocol

import msgspec

from headrace_core.context import MODEL
from headrace_engine.clients.process import describe_status
from headrace_engine.config import EngineConfig
from headrace_engine.log_lines import writes_colours, writes_json
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.nodes.joined import JoinedNode
from headrace_engine.multiproc.places import RankHello, RankPlace

logger = logging.getLogger(__name__)

MODULE = "headrace_engine.multiproc.rank_process"


class RankHandle(Protocol):
    """A rank's process."""

    @property
    def pid(self) -> int:
        """Its id on its host; 0: not known yet."""
        ...

    def made(self, pid: int) -> None:
        """It has made its worker, and says its id."""
        ...

    def wait(self, seconds: float) -> bool:
        """True if it has ended within so many seconds."""
        ...

    def gone(self) -> None:
        """Its connection has closed."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...

    def reason(self, seconds: float, last_words: str) -> str:
        """Why it has ended, for people. Waits so long for that.

        Args:
            last_words: what it said itself, if anything.
        """
        ...


class ChildRank:
    """A child of this process."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._rank, self._process = rank, process

    @property
    def pid(self) -> int:
        return self._process.pid

    def made(self, pid: int) -> None:
        """Known already."""

    def gone(self) -> None:
        """The process's end says so, too."""

    def wait(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()

    def reason(self, seconds: float, last_words: str) -> str:
        how = "closed its connection"
        if self.wait(seconds):
            how = describe_status(self._process.returncode)
        else:
            self._process.kill()
        return f"rank {self._rank} (process {self.pid}) ended: {last_words or how}"


class NodeRank:
    """A process of another host, which starts it and says how it ends."""

    def __init__(self, rank: int, node: JoinedNode) -> None:
        self._rank, self._node = rank, node
        self._gone = threading.Event()
        self.pid = 0

    def made(self, pid: int) -> None:
        self.pid = pid

    def gone(self) -> None:
        self._gone.set()

    def wait(self, seconds: float) -> bool:
        return self._gone.wait(seconds)

    def kill(self) -> None:
        """Its host ends it, once told."""
        with contextlib.suppress(OSError):
            self._node.ranks[self._rank].shutdown(socket.SHUT_RDWR)

    def reason(self, seconds: float, last_words: str) -> str:
        process = f"process {self.pid} on " if self.pid else ""
        own = f"rank {self._rank} ({process}node {self._node.node}, {self._node.name}) ended"
        if last_words:
            return f"{own}: {last_words}"
        return self._node.reason(seconds) or f"{own}: closed its connection"


def start_child(
    factory: str,
    config: EngineConfig,
    place: RankPlace,
    connection: socket.socket,
    descriptors: Sequence[socket.socket],
) -> subprocess.Popen[bytes]:
    """Start a rank's process, and say over a connection what it is.

    Args:
        descriptors: of its own, by rank_process's arguments; closed here.
    """
    hello = RankHello(
        factory=factory,
        config=config,
        place=place,
        log_level=logger.getEffectiveLevel(),
        log_json=writes_json(__name__),
        log_colour=writes_colours(__name__),
        log_model=MODEL.get(),
    )
    with contextlib.ExitStack() as stack:
        for own in descriptors:
            stack.enter_context(own)
        numbers = [own.fileno() for own in descriptors]
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            pass_fds=numbers,
            process_group=0,  # a terminal's Ctrl-C is rank 0's, also while this one imports
        )
    with contextlib.suppress(OSError):  # ended already: whoever reads will say so
        frames.send(connection, frames.pack(msgspec.json.encode(hello)))
    return process
