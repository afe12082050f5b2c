"""Calls of several threads at once, for tests of one engine under many hands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

LIMIT = 60.0
"""Seconds after which a hang is one."""


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls, each from a daemon thread of its own: one that hangs fails the test only.

    Raises: what a call raised; TimeoutError: one hangs.
    """
    ready = threading.Barrier(len(calls))
    futures: list[Future[Any]] = [Future() for _ in calls]

    def run(call: Callable[[], Any], future: Future[Any]) -> None:
        ready.wait(LIMIT)
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    for call, future in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=(call, future), daemon=True).start()
    return [future.result(LIMIT) for future in futures]
