"""Requests that are all there before the engine's first step, however slow this machine is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace import LLM

LONGEST_WAIT = 120.0


@contextmanager
def together(llm: LLM, count: int) -> Iterator[None]:
    """For the block, the engine takes no step before ``count`` requests were added.

    What depends on requests that run side by side, as preemption, else depends on how fast they
    are added. For engines in this process.
    """
    engine, everybody = llm.engine, threading.Event()
    add, added = engine.add_request, 0

    def counting(*args, **kwargs) -> None:
        nonlocal added
        add(*args, **kwargs)
        added += 1
        if added == count:
            everybody.set()

    held = engine.client._loop._call(lambda: everybody.wait(LONGEST_WAIT))
    engine.add_request = counting
    try:
        yield
    finally:
        everybody.set()
        del engine.add_request
    assert held.result(LONGEST_WAIT), f"only {added} of {count} requests came"
