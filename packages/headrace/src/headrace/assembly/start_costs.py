"""Where the costs that a start measures are kept, and what they depend on."""

from __future__ import annotations

import dataclasses
import os
import platform as machine
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.assembly.resolved import ResolvedConfig
from headrace_core import plugins

if TYPE_CHECKING:
    from headrace_core.ops import OpTable
    from headrace_engine.cores import CpuThreads
    from headrace_engine.execution.measuring.kept_costs import KeptCosts

CACHE_ROOT = "HEADRACE_CACHE_ROOT"
_MEASURED = ("HEADRACE_CPU_ISA", "HEADRACE_BATCH_INVARIANT", "LD_PRELOAD", "GLIBC_TUNABLES")
"""Variables that change how much memory a step takes, and those of malloc."""
_COMPUTE = ("headrace.kernels", "headrace.attention_backends", "headrace.models")
"""Groups of plug-ins that compute steps."""


def cache_root(environ: Mapping[str, str]) -> Path | None:
    """Folder of what headrace keeps between starts (XDG Base Directory Specification, cache data); None:
    the variable is empty, nothing is kept."""
    named = environ.get(CACHE_ROOT)
    if named is not None:
        return Path(named).expanduser() if named else None
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "headrace"


def kept_costs(
    resolved: ResolvedConfig, ops: OpTable, threads: CpuThreads, environ: Mapping[str, str]
) -> KeptCosts | None:
    """What an earlier start of this model with these settings measured; None: nothing is kept.

    Only on a CPU, and with one rank: several measure together, so all of them must or none.
    """
    config = resolved.config
    wanted = config.device.keep_start_costs and config.parallel.num_ranks == 1
    root = cache_root(environ)
    if root is None or not wanted or resolved.platform.device != "cpu":
        return None
    from headrace_engine.execution.measuring.kept_costs import KeptCosts

    return KeptCosts(root / "start-costs", _subject(resolved, ops, threads, environ))


def _subject(
    resolved: ResolvedConfig, ops: OpTable, threads: CpuThreads, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Whatever the cost depends on: settings, checkpoint, code, machine."""
    return {
        "config": dataclasses.asdict(resolved.config),
        "model": dataclasses.asdict(resolved.info),
        "fits_context": resolved.fit_context,
        "files": _files(resolved.info.path),
        "versions": _versions(resolved),
        "kernels": dict(ops.providers),
        "threads": [threads.num_threads, list(threads.cores)],
        "machine": [machine.machine(), _processor(), os.cpu_count()],
        "environment": {name: environ.get(name) for name in _MEASURED}
        | {name: value for name, value in environ.items() if name.startswith("MALLOC_")},
    }


def _files(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of a checkpoint: nothing is read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [(file.name, stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]


def _versions(resolved: ResolvedConfig) -> list[str]:
    """Of what computes steps: plug-ins of kernels, attention and models, headrace's own among them, and
    libraries."""
    import torch

    groups = [plugins.installed(group) for group in _COMPUTE]
    found = {plugin.distribution for group in groups for plugin in group.values()}
    found.add(f"torch {torch.__version__}")
    if resolved.info.source == "transformers":
        found.add(f"transformers {version('transformers')}")
    return sorted(found)


def _processor() -> str:
    """The processor's name, which folders that machines share must tell apart."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(
                (line.split(":", 1)[1].strip() for line in file if "model name" in line), ""
            )
    except OSError:
        return machine.processor()
