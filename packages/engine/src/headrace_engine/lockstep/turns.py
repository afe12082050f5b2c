"""Empty passes of an engine that has nothing to run while engines with which it shares experts do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from headrace_core.executor import Executor
from headrace_engine.lockstep.peers import PeerEngines

logger = logging.getLogger(__name__)

TAKE_PART, TAKE_LEAVE = "take_part", "take_leave"
"""The workers' methods that run an empty pass: one of many, and one of an engine that is to end."""
LEAVE_SECONDS = 10.0
"""Longest stay of an engine that is to end while others are not."""


class LockstepTurns:
    """What an engine's loop does when it has nothing to run."""

    def __init__(self, peers: PeerEngines, executor: Executor) -> None:
        self._peers, self._executor = peers, executor

    def when_due(self, call: Callable[[], None]) -> None:
        """Call this, from any thread, when an empty pass may be due."""
        self._peers.when_due = call

    def take_part(self) -> bool:
        """Run an empty pass, if one is due; False: none is.

        Raises:
            BaseException: an engine has ended, or the pass failed.
        """
        if not self._peers.waves.is_due:
            return False
        self._executor.call(TAKE_PART)
        return True

    def leave(self) -> None:
        """Run empty passes until all engines are to end: none leaves while another one would wait for it.

        Raises:
            BaseException: an engine has ended, or a pass failed.
        """
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._executor.failure is None and not self._executor.call(TAKE_LEAVE)[0]:
            if time.monotonic() > deadline:
                logger.warning("other engines were not told to end within %g s", LEAVE_SECONDS)
                return

    def close(self) -> None:
        """Hear of no further waves."""
        self._peers.close()
