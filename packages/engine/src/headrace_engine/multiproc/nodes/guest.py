"""A rank other than 0 in a process that somebody else started: torchrun, or Ray."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from headrace_core.errors import EngineDead
from headrace_engine.multiproc.incoming import Incoming
from headrace_engine.multiproc.messages import Failed
from headrace_engine.multiproc.nodes.joining import Joined
from headrace_engine.multiproc.places import RankPlace
from headrace_engine.multiproc.rank_process import Replies, follow
from headrace_engine.threads import in_this_context

logger = logging.getLogger(__name__)


class GuestRank:
    """Runs the only rank of this process in a thread, until rank 0 says to stop.

    Args:
        joined: its connections; closed by :meth:`close`.
        make: makes its worker, in that thread.
    """

    def __init__(self, joined: Joined, make: Callable[[RankPlace], Any]) -> None:
        [(rank, self._connection)] = joined.ranks.items()
        accepted = joined.accepted
        self._joined, self._make = joined, make
        self._place = RankPlace(
            rank, accepted.world_size, accepted.communicator, accepted.rendezvous, accepted.stages,
            num_here=1,
        )  # fmt: skip
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        """Why it has ended, unless it was told to."""
        self.ended = threading.Event()
        self._threads = [
            threading.Thread(target=in_this_context(run), name=name, daemon=True)
            for run, name in ((self._read, "headrace-rank-reader"), (self._run, "headrace-worker"))
        ]

    @property
    def rank(self) -> int:
        """Its number."""
        return self._place.rank

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End it, if rank 0 has not; its thread may still be in an exchange that others end."""
        self._joined.close()

    def _read(self) -> None:
        incoming = Incoming(self._connection)
        try:
            while True:
                self._messages.put(incoming.receive())
        except (EOFError, OSError):
            self._messages.put(EngineDead("rank 0 is gone"))
        except BaseException as error:
            self._messages.put(error)

    def _run(self) -> None:
        replies = Replies(self._connection)
        try:
            follow(lambda: self._make(self._place), replies, self._messages.get)
        except BaseException as error:
            logger.debug("rank %d ends", self._place.rank, exc_info=True)
            self.failure = error
            with contextlib.suppress(OSError):
                replies.send(Failed(type(error).__name__, str(error)))
        finally:
            self.ended.set()
            with contextlib.suppress(OSError):  # rank 0 sees the end
                self._connection.shutdown(socket.SHUT_RDWR)
