"""Turns the libraries' errors for memory that the system refuses into one that says what it was for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_TORCHS_WORDS = "DefaultCPUAllocator"
"""Part of the message of the bare RuntimeError that torch raises on a CPU, for which it has no class."""


@contextmanager
def memory_errors(what: str) -> Iterator[None]:
    """``with memory_errors("the KV cache"): ...``

    Raises:
        MemoryError: the block asked for memory on a CPU and did not get it.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and _TORCHS_WORDS not in str(error):
            raise
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise MemoryError(f"{what}: the system refused the memory: {said:.300}") from error
