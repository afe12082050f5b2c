"""The models that come with headrace: one that runs when none is named, one that sees."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace_core.errors import ConfigError, MissingDependency


class Demo(NamedTuple):
    """A checkpoint that is data in a distribution."""

    name: str
    """Served name, and the distribution's."""
    skills: str
    """For users who meet it in a terminal."""
    install: str


NAME = "headrace-demo"
"""Served name of the demo model."""
DEMOS: Mapping[str, Demo] = {
    "text": Demo(
        NAME,
        "The demo model makes small talk and adds small numbers, in conversations only.",
        "pip install headrace-demo, or name a model: headrace serve /path/to/checkpoint",
    ),
    "vision": Demo(
        "headrace-demo-vision",
        "The vision demo model names shapes, colours and digits in a picture: drop one here, then ask.",
        "pip install 'headrace[vision-demo]'",
    ),
}
"""``--demo`` -> what it runs."""


def path(which: str = "text") -> Path:
    """Folder of a demo checkpoint.

    Raises:
        ConfigError: there is no such demo.
        MissingDependency: its distribution is not installed.
    """
    demo = DEMOS.get(which)
    if demo is None:
        raise ConfigError(f"demo = {which!r}: must be one of {', '.join(DEMOS)}", field="demo")
    module = demo.name.replace("-", "_")
    if importlib.util.find_spec(module) is None:
        needed = "running without naming a model" if which == "text" else f"--demo {which}"
        raise MissingDependency(module, needed_for=needed, install=demo.install)
    folder: Path = importlib.import_module(module).model_path()
    return folder


def skills(served_name: str) -> str | None:
    """What a demo model can do, by the name that it is served under; None for other models."""
    return next((demo.skills for demo in DEMOS.values() if demo.name == served_name), None)
