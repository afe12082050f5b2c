"""Classes of IO processors, installed as plug-ins."""

from __future__ import annotations

import importlib
from typing import Any

from headrace_core import plugins
from headrace_core.errors import PluginLoadError
from headrace_core.pooling.io_processor import GROUP, IOProcessor


def load_io_processor(name: str) -> type[IOProcessor]:
    """The class of an installed IO processor.

    Raises:
        PluginNotFound: lists those that are installed.
        PluginLoadError: it cannot be imported, or is no IO processor.
    """
    found = plugins.load(GROUP, name)
    if not isinstance(found, type) and callable(found):
        found = _by_name(name, found())
    if not (isinstance(found, type) and issubclass(found, IOProcessor)):
        raise PluginLoadError(
            f"plug-in {name!r} of group {GROUP!r} is {found!r:.100}: must be a subclass of "
            "headrace_core.pooling.io_processor.IOProcessor, or a function returning the name of one"
        )
    return found


def _by_name(name: str, target: object) -> Any:
    module, _, attribute = str(target).replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginLoadError(
            f"plug-in {name!r} of group {GROUP!r} names {target!r}, which cannot be imported: "
            f"{error}"
        ) from error
