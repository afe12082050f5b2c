"""Verdicts of all backends on a constraint, without a model: for people who write schemas."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_core import plugins
from headrace_core.errors import HeadraceError
from headrace_core.grammar import BACKENDS, Vocabulary
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.backend_loading import GROUP, backend_class, is_installed
from headrace_engine.structured.compile_process import CompileProcesses
from headrace_engine.structured.source import source_of


@dataclass(frozen=True, slots=True)
class Report:
    """One backend's answer."""

    backend: str
    supported: bool
    reasons: list[str] = field(default_factory=list)
    """Reasons of a refusal, each with keyword and JSON pointer where there are such."""
    install: str = ""
    """Advice how to get the backend; "" = it is there."""
    seconds: float = 0.0
    """Seconds of compiling, for a vocabulary of single bytes."""


def check(
    params: StructuredOutputsParams, config: StructuredOutputsConfig, names: Sequence[str] = ()
) -> list[Report]:
    """Ask backends about a constraint; it compiles with the limits that a server has.

    Args:
        params: the constraint.
        config: limits.
        names: backends to ask; default: all that are known.

    Raises:
        RequestError: it is malformed, whatever the backend.
    """
    source_of(params, config)
    known = plugins.installed(GROUP)
    order = [name for name in BACKENDS if name in known]
    asked = names or [*order, *(name for name in known if name not in order)]
    config = dataclasses.replace(config, compile_processes=1)
    processes = CompileProcesses(
        lambda: Vocabulary([bytes([byte]) for byte in range(256)]),
        count=1,
        seconds=config.compile_seconds,
        memory_bytes=config.compile_memory_bytes,
    )
    try:
        return [_report(name, params, config, processes) for name in asked]
    finally:
        processes.close()


def _report(
    name: str,
    params: StructuredOutputsParams,
    config: StructuredOutputsConfig,
    processes: CompileProcesses,
) -> Report:
    backend = backend_class(name)
    spec = source_of(params, config).spec(name)
    install = "" if is_installed(backend) else backend.install
    reasons = backend.refuse(spec)
    if reasons or install:
        return Report(name, False, reasons, install)
    try:
        processes.prepare(name)
        begin = time.perf_counter()
        processes.compile(spec)
    except HeadraceError as error:
        return Report(name, False, [str(error)])
    return Report(name, True, seconds=time.perf_counter() - begin)
