"""HTTP server over any :class:`headrace_core.engine.EngineClient`. Imports no torch.

``create_app(engine, settings)`` composes the application; ``headrace_server.run`` binds and serves
it. Names are imported on first use, so that reading the settings (``--help``) loads no web stack.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_server.app import create_app
    from headrace_server.run import bind, serve
    from headrace_server.settings import ServerSettings

__version__ = "0.1.0"

__all__ = ["ServerSettings", "__version__", "bind", "create_app", "serve"]

_HOMES = {
    "ServerSettings": "headrace_server.settings",
    "bind": "headrace_server.run",
    "create_app": "headrace_server.app",
    "serve": "headrace_server.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
