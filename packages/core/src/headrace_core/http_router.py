"""HTTP routers: one plug-in per family of routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headrace_core.engine import EngineClient


class Router(Protocol):
    """The object behind an entry point of ``headrace.routers``.

    Called once at start. A router is skipped, and its routes answer 400 saying so, if the model
    serves none of its tasks.
    """

    name: str
    tasks: Sequence[str]
    """Tasks any of which switches it on; empty = always on."""

    def build(self, engine: EngineClient, settings: Any) -> Any:
        """A ``fastapi.APIRouter``; ``settings`` is the server's settings object."""
