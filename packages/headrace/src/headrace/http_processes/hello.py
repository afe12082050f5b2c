"""Messages from the supervisor to an HTTP process, over its standard input, a line each; JSON.

The end of that input is the supervisor's end.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Hello(msgspec.Struct, frozen=True):
    """The first line."""

    argv: list[str]
    """The command line of ``headrace serve``: each process reads it for itself."""
    rank: int
    name: str
    """Name of the process for the core; a restarted process gets a new one."""
    folder: str
    """Private folder of all sockets."""
    listening: int
    """Descriptor of the socket that all share, bound and listening."""
    admin: int | None
    """The same for the admin port, if there is one."""
    ready: int
    """Descriptor to write a byte to when requests are served."""


class EngineStarted(msgspec.Struct, frozen=True, tag="started"):
    """A later line, once: the engine has started."""

    startup: dict[str, Any]
    """Time of its start by phases, as :meth:`headrace_engine.startup.StartupTimeline.facts` has it."""


class CoreEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A later line: the engine's process has ended."""

    how: str
