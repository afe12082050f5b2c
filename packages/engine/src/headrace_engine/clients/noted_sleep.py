"""How engines sleep, as they were told, so that a new one is told the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace_engine.sleep.engine_sleep import TAGS

Call = tuple[str, list[Any]]
"""Method and arguments of a call of workers."""
_WAKE: Call = ("wake_up", [None])


class NotedSleep(NamedTuple):
    """A sleep from which not all has been woken."""

    args: tuple[Any, ...]
    """Arguments of the call of ``sleep``."""
    awake: tuple[str, ...] = ()
    """Tags that were woken since."""

    def calls(self) -> list[Call]:
        """Calls after which an engine that is awake sleeps so."""
        woken: list[Call] = [("wake_up", [list(self.awake)])] if self.awake else []
        return [("sleep", list(self.args)), *woken]


def noted(sleep: NotedSleep | None, method: str, args: Sequence[Any]) -> NotedSleep | None:
    """How engines sleep after a call of ``sleep`` or ``wake_up``, if they obey it; None: they are awake.

    Args:
        sleep: how they did before.
    """
    if method == "sleep":
        return NotedSleep(tuple(args))
    tags = args[0] if args else None
    if sleep is None or tags is None:
        return None
    given = tags if isinstance(tags, list | tuple) else ()  # what is no list is refused by engines
    awake = tuple(tag for tag in TAGS if tag in sleep.awake or tag in given)
    return None if awake == TAGS else sleep._replace(awake=awake)


def calls_between(before: NotedSleep | None, after: NotedSleep | None) -> list[Call]:
    """Calls that bring an engine from one state to another."""
    woken = [] if before is None and after is not None else [_WAKE]
    return woken + ([] if after is None else after.calls())
