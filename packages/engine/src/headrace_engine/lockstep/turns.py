"""An engine that shares experts, and what its loop does for the others: empty passes while they run some, and
calls that all obey together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace_core.executor import Executor
from headrace_engine.lockstep.joint_calls import obey_jointly
from headrace_engine.lockstep.peers import PeerEngines

logger = logging.getLogger(__name__)

TAKE_PART, TAKE_LEAVE = "take_part", "take_leave"
"""The workers' methods that run an empty pass: one of many, and one of an engine that is to end."""
LEAVE_SECONDS = 10.0
"""Longest stay of an engine that is to end while others are not."""
NEWS_SECONDS = 1.0
"""Time between two looks at an engine's own ranks, while it waits for what other engines say."""

Result = TypeVar("Result")


class LockstepTurns:
    """An engine's part in passes and calls of all engines, for its loop."""

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

    def obey(
        self,
        call: str,
        *,
        check: Callable[[], None],
        obey: Callable[[], Result],
        take_back: Callable[[BaseException], None],
    ) -> Result:
        """Obey a call that every engine gets, all of them or none, between the same two passes. No step of
        this engine may be in flight. See :func:`~headrace_engine.lockstep.joint_calls.obey_jointly`.

        Raises:
            BaseException: likewise; or a rank of this engine has ended.
        """
        return obey_jointly(self._agree, call, check=check, obey=obey, take_back=take_back)

    def _agree(self, word: str) -> Sequence[str]:
        """Say a word, and hear those of all engines, by engine. Until then passes of others that still run
        find this engine in its place; when it returns none is under way, nor will be until one begins to run
        requests."""
        number = self._peers.say(word)
        while (words := self._peers.words(number)) is None:
            self._raise_failure()
            if not self.take_part():
                self._peers.wait_for_news(number, NEWS_SECONDS)
        # Who said its word had begun its passes before, and said so.
        while self.take_part():
            pass
        return words

    def _raise_failure(self) -> None:
        if self._executor.failure is not None:
            raise self._executor.failure

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
