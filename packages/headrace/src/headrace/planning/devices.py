"""Devices that a plan is for: ``2x64GiB@100GB/s``, or this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError

_SIZES = {
    f"{letter}{middle}B": base**power
    for middle, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("KMGT", start=1)
}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)\s*"
_UNIT = rf"({'|'.join(_SIZES)})"
_DEVICES = re.compile(rf"(?:([0-9]+)x)?(?:(cpu)|{_NUMBER}{_UNIT}@{_NUMBER}{_UNIT}/s)")
_SPEED = re.compile(rf"{_NUMBER}{_UNIT}/s")
_TIME = re.compile(rf"{_NUMBER}(ms|us)")
MOST_DEVICES = 1024
NODES = Path("/sys/devices/system/node")


class Devices(NamedTuple):
    """Equal devices. Sizes in bytes, speeds in bytes a second, times in seconds."""

    number: int
    memory: int
    """Free on each, before anything is loaded."""
    bandwidth: float
    """With which each reads its memory."""
    link: float = 0.0
    """With which each sends to, and at the same time receives from, another; 0: not known."""
    latency: float = 0.0
    """Of one exchange between ranks."""
    machine: str = ""
    """This machine in words; empty: devices that were only described."""

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return self._asdict()


def parse_devices(text: str, free_memory: int) -> Devices:
    """Read ``--devices``.

    Args:
        text: ``64GiB@100GB/s`` or ``cpu``, with ``Nx`` in front of several. ``cpu`` is each NUMA node of this
            machine, ``Nxcpu`` each of N equal parts of it.
        free_memory: bytes that are free on this machine, for ``cpu``.

    Raises:
        ConfigError: neither of them.
    """
    match = _DEVICES.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"devices = {text!r}: must be a number of devices with their memory and the speed of reading it, "
            "as 2x64GiB@100GB/s, or cpu for this machine (2xcpu: two parts of it)",
            field="devices",
        )
    number, is_cpu, size, size_unit, speed, speed_unit = match.groups()
    count = None if number is None else int(number)
    if count is not None and not 1 <= count <= MOST_DEVICES:
        raise ConfigError(
            f"devices = {text!r}: must be 1 to {MOST_DEVICES} devices", field="devices"
        )
    if is_cpu:
        return this_machine(free_memory, count)
    memory, bandwidth = float(size) * _SIZES[size_unit], float(speed) * _SIZES[speed_unit]
    if not memory or not bandwidth:
        raise ConfigError(f"devices = {text!r}: memory and speed must be above 0", field="devices")
    return Devices(count or 1, int(memory), bandwidth)


def parse_speed(text: str, field: str) -> float:
    """``20GB/s`` in bytes a second. Raises: ConfigError."""
    match = _SPEED.fullmatch(text.strip())
    speed = 0.0 if match is None else float(match[1]) * _SIZES[match[2]]
    if not speed:
        raise ConfigError(f"{field} = {text!r}: must be a speed, as 20GB/s", field=field)
    return speed


def parse_time(text: str, field: str) -> float:
    """``5us`` in seconds. Raises: ConfigError."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{field} = {text!r}: must be a time, as 5us or 0.1ms", field=field)
    return float(match[1]) * (1e-3 if match[2] == "ms" else 1e-6)


def this_machine(free_memory: int, parts: int | None = None) -> Devices:
    """This machine's memory and its speed of reading, divided evenly, as the engine divides them over
    ranks.

    Args:
        parts: None: as many as there are NUMA nodes.
    """
    from headrace.assembly.read_speed import read_speed

    cores = usable_cores()
    nodes = numa_nodes(cores)
    count = parts or nodes
    told = f"{len(cores)} cores, {nodes} NUMA node{'s' if nodes > 1 else ''}"
    return Devices(count, free_memory // count, read_speed() / count, machine=told)


def usable_cores() -> frozenset[int]:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def numa_nodes(cores: Collection[int], folder: Path = NODES) -> int:
    """Number of memory nodes that have one of the cores; 1 where the system does not say.

    Args:
        folder: with ``node0/cpulist`` and so on, as Linux has it (sysfs-devices-system-node).
    """
    return len(cores_by_node(cores, folder))


def cores_by_node(cores: Collection[int], folder: Path = NODES) -> list[tuple[int, ...]]:
    """The cores of each memory node that has some, ascending; all together where the system does not say.

    Args:
        folder: see :func:`numa_nodes`.
    """
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    nodes = [tuple(core for core in _listed(file.read_text()) if core in cores) for file in files]
    return [node for node in nodes if node] or [tuple(sorted(cores))]


def _listed(text: str) -> list[int]:
    """``0-3,8`` -> [0, 1, 2, 3, 8]."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
