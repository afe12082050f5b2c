"""Whose request this is, for fair shares: the name of an API key, never the key.

The server's gate sets it for the time of a request; the engine reads it where a request comes in
(:meth:`~headrace_core.engine.EngineClient.generate`). It is a context variable, and not an argument,
so that no route between the two has to know of it.
"""

from __future__ import annotations

from contextvars import ContextVar

OWNER: ContextVar[str] = ContextVar("headrace_owner", default="")
"""Name of the key of the request that is being served; empty: none."""
