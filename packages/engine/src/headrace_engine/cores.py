"""Processor cores: which this process may use, and which its compute threads are bound to.

Linux gives a process a set of cores (``taskset``, cpusets) and a container a share of their time
(a cgroup's quota); both limit how many threads can run at once. Only Linux lets threads be bound.
Cores are numbered as the system numbers them, from 0. Imports no torch.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from headrace_core.errors import ConfigError

logger = logging.getLogger(__name__)

BIND_FIELD, THREADS_FIELD = "device.cpu_bind", "device.num_threads"


class CpuThreads(NamedTuple):
    """The threads that compute on the CPU."""

    num_threads: int
    """At least 1."""
    cores: tuple[int, ...] = ()
    """One for each thread; empty: wherever the system puts them."""


def usable_cores() -> tuple[int, ...]:
    """Cores on which the calling thread may run, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def most_threads() -> int:
    """Number of threads of this process that can run at once: its cores, or its quota if that is less.

    A fraction of a core counts for nothing (but there is always one): threads beyond the quota make
    the system stop all of them for a part of each period.
    """
    quota = cpu_quota()
    most = len(usable_cores())
    return most if quota is None else max(1, min(most, math.floor(quota)))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of time that cgroups (version 2 or 1) allow this process; None: unlimited.

    Args:
        root: the file system that has ``proc`` and ``sys``.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    mount = root / "sys/fs/cgroup"
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            quotas += _quotas_v2(mount, path)
        elif "cpu" in controllers.split(","):
            quotas += _quotas_v1(mount / "cpu", path)
    return min(quotas, default=None)


def _quotas_v2(mount: Path, path: str) -> Iterator[float]:
    for folder in _up(mount, path):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            yield int(quota) / int(period)


def _quotas_v1(mount: Path, path: str) -> Iterator[float]:
    for folder in _up(mount, path):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1: unlimited
            yield int(quota) / int(period)


def _up(mount: Path, path: str) -> Iterator[Path]:
    """A group's folder and its parents'; in a container only the last, the mount, may exist."""
    group = PurePosixPath(path.lstrip("/"))
    for parent in (group, *group.parents):
        yield mount / parent


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def parse_cores(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` -> (0, 1, 2, 3, 8), in the order written.

    Raises:
        ValueError: the text is no such list, or names a core twice.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a number nor a range")
        if dash and int(last) < int(first):
            raise ValueError(f"{part!r} ends before it begins")
        cores += range(int(first), int(last or first) + 1)
    if len(set(cores)) < len(cores):
        raise ValueError("a core is named twice")
    return tuple(cores)


def format_cores(cores: Iterable[int]) -> str:
    """(0, 1, 2, 3, 8) -> ``"0-3,8"``."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def plan_threads(num_threads: int, cpu_bind: str, *, default: int) -> CpuThreads:
    """Resolve ``device.num_threads`` and ``device.cpu_bind`` on this machine.

    Never more threads than :func:`most_threads`; bound ones have a core each.

    Args:
        num_threads: as configured; 0: one for each core of a list, else ``default``, but no more
            than can run at once.
        cpu_bind: ``none``, ``auto`` or a list of cores.
        default: how many threads torch would use.

    Raises:
        ConfigError: more threads than can run at once, or than the list has cores; a core that this
            process may not use; binding on a system that cannot.
    """
    most = most_threads()
    if num_threads > most:
        raise ConfigError(
            f"{THREADS_FIELD} = {num_threads}: must be at most {most}: {_limits()}",
            field=THREADS_FIELD,
        )
    if cpu_bind == "none":
        return CpuThreads(num_threads or _capped(default, most))
    if sys.platform != "linux":
        raise ConfigError(
            f"{BIND_FIELD} = {cpu_bind!r}: must be 'none' on {sys.platform}: only Linux lets a "
            "process bind its threads to cores",
            field=BIND_FIELD,
        )
    if cpu_bind == "auto":
        count = num_threads or _capped(default, most)
        return CpuThreads(count, _apart(usable_cores())[:count])
    cores = _listed(cpu_bind)
    if num_threads > len(cores):
        raise ConfigError(
            f"{THREADS_FIELD} = {num_threads}: must be at most {len(cores)}, the number of cores "
            f"in {BIND_FIELD} = {cpu_bind!r}; 0 means one thread for each",
            field=THREADS_FIELD,
        )
    count = num_threads or _capped(len(cores), most)
    return CpuThreads(count, cores[:count])


def _listed(cpu_bind: str) -> tuple[int, ...]:
    """The cores of a list, all of them usable."""
    cores, usable = parse_cores(cpu_bind), usable_cores()
    foreign = [core for core in cores if core not in usable]
    if foreign:
        raise ConfigError(
            f"{BIND_FIELD} = {cpu_bind!r}: must name cores that this process may use: not "
            f"{format_cores(foreign)}; {_limits()}",
            field=BIND_FIELD,
        )
    return cores


def _capped(count: int, most: int) -> int:
    if count > most:
        logger.warning("%d CPU threads instead of %d: %s", most, count, _limits())
    return min(count, most)


def _limits() -> str:
    quota = cpu_quota()
    text = f"this process may use cores {format_cores(usable_cores())}"
    return text if quota is None else f"{text}, and {quota:g} cores' worth of time (cgroup quota)"


def physical_cores(cores: Iterable[int], root: Path = Path("/")) -> tuple[int, ...]:
    """Physical cores: of those that share one, the first.

    Args:
        root: the file system that has ``sys``.
    """
    alone: list[int] = []
    taken: set[int] = set()
    for core in cores:
        text = _read(root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        if core not in taken:
            alone.append(core)
        taken.update(parse_cores(text) if text else (core,))
    return tuple(alone)


def _apart(cores: tuple[int, ...], root: Path = Path("/")) -> tuple[int, ...]:
    """The same cores, those first that share no physical core with an earlier one."""
    alone = physical_cores(cores, root)
    return (*alone, *(core for core in cores if core not in alone))
