"""Guard against work that grows faster than the text, measured by processor time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_SMALL, _FACTOR = 6_000, 8
_SLACK = 3.0
_ATTEMPTS = 5


def assert_linear(work: Callable[[str], object], make: Callable[[int], str]) -> None:
    """``work`` on a text of eight times the size takes at most 24 times as long.

    Quadratic work takes 64 times as long. Short of that, what disturbs a measurement (other
    processes, caches) only ever adds to it, so the best of some attempts counts.

    Args:
        work: what is measured.
        make: a text of about so many characters.
    """
    small, large = make(_SMALL), make(_SMALL * _FACTOR)
    short = min(_time(work, small) for _ in range(3))
    took: list[float] = []
    for _ in range(_ATTEMPTS):
        took.append(_time(work, large))
        if took[-1] <= _FACTOR * _SLACK * short:
            return
    raise AssertionError(
        f"{short:.4f} s became {took} s at {_FACTOR} times the size: {small[:99]!r}"
    )


def _time(work: Callable[[str], object], text: str) -> float:
    """Seconds of this thread, the collector of garbage not counted."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        begin = time.thread_time()
        work(text)
        return time.thread_time() - begin
    finally:
        if was_enabled:
            gc.enable()
