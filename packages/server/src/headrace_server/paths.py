"""Paths as the router sees them, and those that anybody may ask for."""

from __future__ import annotations

from starlette.types import Scope

OPEN_PATHS = frozenset({"/health", "/livez", "/readyz", "/ping", "/version"})
"""Health checks: no key needed, answered while draining."""


def below_root(path: str, root: str) -> str:
    """``path`` without the prefix ``root``, if it has it as a whole first part."""
    if root and path.startswith(root) and path[len(root) : len(root) + 1] in ("/", ""):
        return path[len(root) :]
    return path


def route_path(scope: Scope) -> str:
    """The decoded path that routes are matched against."""
    return below_root(scope["path"], scope.get("root_path", ""))
