"""The model that runs when none is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headrace_core.errors import MissingDependency

NAME = "headrace-demo"
"""Served name of the demo model."""
SKILLS = "The demo model makes small talk and adds small numbers, in conversations only."
"""For users who meet it in a terminal."""


def path() -> Path:
    """Folder of the demo checkpoint.

    Raises:
        MissingDependency: the distribution ``headrace-demo`` is not installed.
    """
    if importlib.util.find_spec("headrace_demo") is None:
        raise MissingDependency(
            "headrace_demo",
            needed_for="running without naming a model",
            install="pip install headrace-demo, or name a model: headrace serve /path/to/checkpoint",
        )
    import headrace_demo

    return headrace_demo.model_path()
