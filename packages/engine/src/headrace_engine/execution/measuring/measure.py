"""Memory that is free, used, and used at most while something runs."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from headrace_core.platform import CpuPlatform
from headrace_engine import freed_memory
from headrace_engine.execution.populate import populated_bytes, unwritten_bytes


@dataclass(slots=True)
class Peak:
    """Filled in when the measured block ends."""

    bytes: int = 0
    """Growth over what was used at the beginning."""


class MemoryMeter(Protocol):
    """One device's memory as this process sees it."""

    def available(self) -> int:
        """Bytes that could be allocated now."""
        ...

    def used(self) -> int:
        """Bytes that this process holds now."""
        ...

    def peak(self) -> AbstractContextManager[Peak]:
        """``with meter.peak() as peak: ...`` measures the block."""
        ...

    def trim(self) -> None:
        """Give memory that is free within this process back."""
        ...


def memory_meter(device: torch.device) -> MemoryMeter:
    """The meter of a device."""
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter()


class ProcessMeter:
    """The process's resident set, from ``/proc``, else from ``getrusage``; without the caches that
    other threads make resident meanwhile, of whichever engine."""

    def available(self) -> int:
        return max(0, CpuPlatform().available_memory() - unwritten_bytes())

    def used(self) -> int:
        return resident_bytes() - populated_bytes()

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        result = Peak()
        self.trim()  # what is free already would hide as much of the growth
        _reset_high_water()
        before = self.used()
        yield result
        highest = (_status_bytes("VmHWM:") or _highest_resident()) - populated_bytes()
        result.bytes = max(0, highest - before)

    def trim(self) -> None:
        freed_memory.trim()


def resident_bytes() -> int:
    """This process's resident set."""
    return _status_bytes("VmRSS:") or _highest_resident()


class CudaMeter:
    """Torch's caching allocator on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        free, _total = torch.cuda.mem_get_info(self._device)
        return int(free)

    def used(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        result = Peak()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = self.used()
        yield result
        torch.cuda.synchronize(self._device)
        result.bytes = int(torch.cuda.max_memory_allocated(self._device)) - before

    def trim(self) -> None:
        torch.cuda.empty_cache()


def _status_bytes(field: str) -> int:
    """A field of ``/proc/self/status`` in bytes; 0 where there is none."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _reset_high_water() -> None:
    """Set VmHWM to the present resident set (proc(5), clear_refs, value 5)."""
    # Where it cannot be reset, the peak is that of the process's life: too large, never too small.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _highest_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
