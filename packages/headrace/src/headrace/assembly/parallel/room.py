"""Refuses engines that are to be added to those that run, where the machine has no room for them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError

FIELD = "new_data_parallel_size"
_PARTS = ("weights_bytes", "activations_bytes", "cache_bytes")


def no_room(wanted: int, most: int, why: str) -> RequestError:
    """The refusal of more engines than there may be."""
    return RequestError(f"{FIELD} = {wanted}: must be at most {most}: {why}", param=FIELD)


def check_memory(
    num_engines: int, num_ranks: int, reports: Sequence[Mapping[str, Any]], available: int
) -> None:
    """Refuse engines for which there is not enough memory, by what those that run have.

    Args:
        num_engines: those that run, and those that are to come.
        num_ranks: workers of an engine.
        reports: of the workers that run.
        available: bytes that are free now.

    Raises:
        RequestError: with the figures.
    """
    running = len(reports) // num_ranks
    if not running:
        return
    plans = [sum(int(report[part]) for part in _PARTS) for report in reports]
    # A cache's memory is taken from the system when it is first written.
    promised = sum(
        max(0, plan - resident_bytes(int(report["pid"])))
        for plan, report in zip(plans, reports, strict=True)
    )
    needed, room = sum(plans) // running, max(0, available - promised)
    if (num_engines - running) * needed <= room:
        return
    raise no_room(
        num_engines,
        running + room // needed,
        f"an engine takes {_gib(needed)}; {_gib(available)} of memory are free, of which those that run will "
        f"still take {_gib(promised)}; start with less for each (--max-memory-bytes)",
    )


def resident_bytes(pid: int) -> int:
    """Memory that a process has now; 0 if the system does not tell."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"
