"""Context variables that cross packages: whose request is served, and by which model.

They are no arguments, so that no route between who sets them and who reads them has to know of them.
"""

from __future__ import annotations

from contextvars import ContextVar

OWNER: ContextVar[str] = ContextVar("headrace_owner", default="")
"""Name of the API key of the request that is being served, never the key; empty: none.

The server's gate sets it for a request; the engine reads it where a request comes in, for fair shares."""

ENGINE: ContextVar[int | None] = ContextVar("headrace_engine", default=None)
"""The engine that the client asks for, where a server has several; read as :data:`OWNER` is."""

MODEL: ContextVar[str] = ContextVar("headrace_model", default="")
"""Name of the model that lines are about, where a process has several; threads of an engine keep the
one in whose context they were started."""
