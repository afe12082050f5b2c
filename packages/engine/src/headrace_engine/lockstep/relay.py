"""The front end's part for engines that share experts: it passes on what one of them says to the others.

It says nothing itself and decides nothing. Messages are short texts over a socket in a private folder.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path

from headrace_engine.threads import in_this_context

logger = logging.getLogger(__name__)

MOST_BYTES = 8192
"""Bytes of a message; the longest are words on a call (:mod:`headrace_engine.lockstep.joint_calls`)."""
MEET = b"meet "
"""Beginning of the message that says where ranks meet: engines that come later get it, too."""


class EngineRelay:
    """Listens for engines, and gives each what the others say, from a thread of its own.

    Args:
        num_engines: that will come.
    """

    def __init__(self, num_engines: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="headrace-"))  # mode 0700
        self.path = str(self._folder / "engines")
        self._meeting: bytes | None = None
        self._engines: list[socket.socket] = []
        self._wake, self._woken = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(self.path)
            self._listener.listen(num_engines)
        except BaseException:
            self._close()
            raise
        self._thread = threading.Thread(
            target=in_this_context(self._run), name="headrace-engine-relay", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, and remove the folder. Idempotent."""
        if sys.is_finalizing():  # nobody has closed the engines, and the thread runs no more
            self._close()
            return
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                selector.register(self._listener, selectors.EVENT_READ)
                while self._handle(selector):
                    pass
        finally:
            self._close()

    def _handle(self, selector: selectors.BaseSelector) -> bool:
        """Handle what has come; False: the end has."""
        for key, _ in selector.select():
            source = key.fileobj
            if source is self._woken:
                return False
            if source is self._listener:
                self._welcome(selector)
            elif isinstance(source, socket.socket):
                self._pass_on(source, selector)
        return True

    def _welcome(self, selector: selectors.BaseSelector) -> None:
        engine, _ = self._listener.accept()
        self._engines.append(engine)
        selector.register(engine, selectors.EVENT_READ)
        if self._meeting is not None:
            _send(engine, self._meeting)

    def _pass_on(self, engine: socket.socket, selector: selectors.BaseSelector) -> None:
        """One message to all others; an engine that has gone is the business of whoever started it."""
        try:
            message = engine.recv(MOST_BYTES)
        except OSError:
            message = b""
        if not message:
            selector.unregister(engine)
            self._engines.remove(engine)
            engine.close()
            return
        if message.startswith(MEET):
            self._meeting = message
        for other in self._engines:
            if other is not engine:
                _send(other, message)

    def _close(self) -> None:
        for one in (*self._engines, self._listener, self._wake, self._woken):
            one.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _send(engine: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it has gone
        engine.send(message)
