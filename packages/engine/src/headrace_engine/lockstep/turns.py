"""Empty passes of an engine that has nothing to run while engines with which it shares experts do."""

from __future__ import annotations

from collections.abc import Callable

from headrace_core.executor import Executor
from headrace_engine.lockstep.peers import PeerEngines

TAKE_PART = "take_part"
"""The workers' method that runs an empty pass."""


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

    def close(self) -> None:
        """Hear of no further waves."""
        self._peers.close()
