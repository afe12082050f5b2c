"""Failpoints: named places that fail when a test asks for it.

``HEADRACE_FAILPOINTS="engine.step.sample=raise(match=victim,after=3);loader.read=enospc"``, read once,
when this module is imported, so that engine processes follow it too. Never set outside of tests: a
process that has it warns (:func:`warn`).

Off, a point costs one comparison::

    if failpoints.PLAN is not None:
        failpoints.hit("kv.alloc", request_id)
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_core.errors import ConfigError

logger = logging.getLogger(__name__)

VARIABLE = "HEADRACE_FAILPOINTS"

POINTS: Mapping[str, str] = {
    "input.prepare": "a request is checked and tokenised",
    "engine.add": "the scheduler takes a request in",
    "kv.match": "a request's beginning is looked up in the prefix cache",
    "kv.alloc": "a request gets blocks for a step",
    "engine.step.prepare": "a worker builds a step's inputs; once for each request of the step",
    "engine.step.forward": "the model runs; once for each request of the step",
    "engine.step.sample": "a token is chosen; once for each request of the step; takes nan",
    "engine.update": "a step's result is taken in, request by request",
    "output.update": "new tokens become text",
    "server.answer": "an answer is made of an output",
    "stream.write": "an event is encoded for a stream",
    "loader.read": "a weights file is opened",
}
"""Name -> when it is passed."""

KINDS = ("raise", "memory", "delay", "nan", "enospc", "kill")
CANARY = "canary-7f3a /canary/secret/path <object at 0x7fcanary00>"
"""In the text of every exception made here: no client may ever see it."""


@dataclass
class Fault:
    """Fault at one point."""

    kind: str
    match: str = ""
    """Only for requests whose id contains this."""
    after: int = 0
    """Not the first so many times."""
    times: int = 1 << 62
    """Only so many times."""
    seconds: float = 1.0
    """Length of a delay."""
    num_passed: int = 0
    """Number of matching requests that have passed the point."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def is_due(self, request_id: str) -> bool:
        """Count one passing; whether it fails."""
        if self.match not in request_id:
            return False
        with self._lock:
            self.num_passed += 1
            return self.after < self.num_passed <= self.after + self.times

    def happen(self) -> bool:
        """Raise, wait or end the process. True: the caller is to compute NaN."""
        if self.kind == "raise":
            raise RuntimeError(CANARY)
        if self.kind == "memory":
            raise MemoryError(CANARY)
        if self.kind == "enospc":
            raise OSError(errno.ENOSPC, CANARY, "/canary/file")
        if self.kind == "delay":
            time.sleep(self.seconds)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.kind == "nan"


Plan = Mapping[str, Fault]


def parse(text: str) -> Plan:
    """``"point=kind(option=value,...);..."`` as a plan.

    Raises:
        ConfigError: unknown point, kind or option.
    """
    plan: dict[str, Fault] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        match = re.fullmatch(r"([\w.]+)=(\w+)(?:\((.*)\))?", part)
        if match is None or match[1] not in POINTS or match[2] not in KINDS:
            raise _wrong(part, f"POINT=KIND(options); points: {', '.join(POINTS)}; kinds: "
                         f"{', '.join(KINDS)}")  # fmt: skip
        plan[match[1]] = Fault(match[2], **_options(part, match[3] or ""))
    return plan


def _options(part: str, text: str) -> dict[str, Any]:
    kinds: dict[str, type] = {"match": str, "after": int, "times": int, "seconds": float}
    options: dict[str, Any] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        try:
            options[name] = kinds[name](value)
        except (KeyError, ValueError):
            raise _wrong(part, f"options of {', '.join(kinds)}") from None
    return options


def _wrong(part: str, accepted: str) -> ConfigError:
    return ConfigError(f"{VARIABLE}: {part!r}: must be {accepted}", field=VARIABLE)


PLAN: Plan | None = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
"""Faults of this process; None: no faults, as always outside of tests."""


def hit(point: str, request_id: str = "") -> bool:
    """Pass a point. True: the caller is to compute NaN (kind ``nan``).

    Raises: what the plan says.
    """
    assert point in POINTS
    fault = PLAN.get(point) if PLAN is not None else None
    if fault is None or not fault.is_due(request_id):
        return False
    logger.warning("failpoint %s: %s for %r", point, fault.kind, request_id)
    return fault.happen()


def warn() -> None:
    """Log a warning if anything is planned. Called at start."""
    if PLAN is not None:
        logger.warning("%s is set: %s will fail on purpose", VARIABLE, ", ".join(PLAN))
