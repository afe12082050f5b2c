"""One engine's connection to the others with which it shares experts."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

from headrace_engine.lockstep.agreement import Agreement
from headrace_engine.lockstep.relay import MEET, MOST_BYTES
from headrace_engine.lockstep.waves import Waves
from headrace_engine.threads import in_this_context

logger = logging.getLogger(__name__)

EXPERT_GROUP, EXPERT_MOVES = "ep", "ep:moves"
"""Names of the groups of all ranks of engines that share experts: of their passes, and of moves of experts
beside these."""
MEETING_SECONDS = 600.0
"""Longest wait for engine 0 to say where the ranks meet: it may be resolving a large checkpoint."""
_GROUPS = (EXPERT_GROUP, EXPERT_MOVES)
_WAVE, _SAID = b"wave ", b"said "
_OF_WAVE = re.compile(rb"wave (\d{1,18})")
_WORD = re.compile(rb"said (\d{1,18}) (\d{1,2}) (.*)", re.DOTALL)
"""Round, engine, and what it said."""


class EnginePlace(msgspec.Struct, frozen=True):
    """One of the engines that share experts, as its process is told of it."""

    engine: int
    """Its number, from 0."""
    num_engines: int
    path: str
    """The socket of :class:`~headrace_engine.lockstep.relay.EngineRelay`."""


class OpensGroups(Protocol):
    """Where ranks of groups find each other."""

    def address(self, name: str) -> str:
        """The address of the group of that name."""


class PeerEngines:
    """The other engines, as one of them hears and tells.

    Raises:
        OSError: the front end does not listen.
    """

    def __init__(self, place: EnginePlace) -> None:
        self.engine, self.num_engines = place.engine, place.num_engines
        self.waves = Waves(self._tell_of_wave)
        self._agreement = Agreement(self.engine, self.num_engines, self._tell_word)
        self._news = threading.Condition()
        """Told of each message."""
        self.when_due: Callable[[], None] = lambda: None
        """Called, from a thread, when another engine has begun a wave."""
        self._meeting: Future[str] = Future()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(place.path)
        threading.Thread(
            target=in_this_context(self._listen), name="headrace-peer-engines", daemon=True
        ).start()

    def meet(self, opened: OpensGroups | None) -> dict[str, str]:
        """Where all ranks of all engines meet, by the name of each of their groups.

        Args:
            opened: engine 0's own place, at which they do; it says so to the others.

        Raises:
            TimeoutError: engine 0 has not said it.
        """
        if self.engine == 0:
            assert opened is not None
            addresses = " ".join(map(opened.address, _GROUPS))
            self._send(MEET + addresses.encode())
        else:
            addresses = self._meeting.result(MEETING_SECONDS)
        return dict(zip(_GROUPS, addresses.split(), strict=True))

    def say(self, word: str) -> int:
        """See :meth:`Agreement.say`."""
        return self._agreement.say(word)

    def words(self, number: int) -> Sequence[str] | None:
        """See :meth:`Agreement.take`."""
        return self._agreement.take(number)

    def wait_for_news(self, number: int, seconds: float) -> None:
        """Return when all words of a round have come, or a pass is due; or after so many seconds."""
        with self._news:
            self._news.wait_for(
                lambda: self.waves.is_due or self._agreement.is_complete(number), seconds
            )

    def close(self) -> None:
        """Leave. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _tell_of_wave(self, number: int) -> None:
        self._send(_WAVE + str(number).encode())

    def _tell_word(self, number: int, word: str) -> None:
        self._send(_SAID + f"{number} {self.engine} {word}".encode())

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # the front end has gone, and so will this process
            self._socket.send(message)

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket:
            while message := self._socket.recv(MOST_BYTES):
                self._take(message)
                with self._news:
                    self._news.notify_all()

    def _take(self, message: bytes) -> None:
        if message.startswith(MEET) and not self._meeting.done():
            self._meeting.set_result(message.removeprefix(MEET).decode())
        elif (wave := _OF_WAVE.fullmatch(message)) is not None:
            self.waves.begun(int(wave[1]))
            self.when_due()
        elif (said := _WORD.fullmatch(message)) is not None and int(said[2]) < self.num_engines:
            self._agreement.heard(int(said[1]), int(said[2]), said[3].decode(errors="replace"))
        else:
            logger.error("peer engines: %r is not a message", message[:64])
