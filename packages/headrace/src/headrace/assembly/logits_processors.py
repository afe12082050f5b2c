"""Classes of logits processors: installed as plug-ins, or named in the configuration."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.sampling.logits_processor import GROUP, LogitsProcessor

_FIELD = "model.logits_processors"


def load_processors(wanted: Sequence[Any]) -> tuple[type[LogitsProcessor], ...]:
    """The classes of a start: every installed plug-in by name, then those wanted, each once.

    Args:
        wanted: classes, or their names as ``package.module:Class``.

    Raises:
        ConfigError: a module cannot be imported, a name is missing in it, or it is no subclass of
            :class:`LogitsProcessor`; names the class as it was given.
        PluginConflict, PluginLoadError: from an installed plug-in.
    """
    found = [_checked(plugin.target, plugin.load()) for plugin in plugins.installed(GROUP).values()]
    return tuple(dict.fromkeys([*found, *named_processors(wanted)]))


def named_processors(wanted: Sequence[Any]) -> list[type[LogitsProcessor]]:
    """Classes given by themselves or by their names; raises as :func:`load_processors`."""
    return [_checked(one, _import(one) if isinstance(one, str) else one) for one in wanted]


def processor_name(processor: Any) -> str:
    """``package.module:Class`` of a class that another process can import; a name stays as it is.

    Raises:
        ConfigError: the class is local to a function or to the main program.
    """
    if isinstance(processor, str):
        return processor
    name = f"{processor.__module__}:{processor.__qualname__}"
    if processor.__module__ == "__main__" or "<locals>" in name:
        raise ConfigError(
            f"{_FIELD}: {name} cannot be imported by another process; define the class in a separate "
            f"module, or run without --engine-process",
            field=_FIELD,
        )
    return name


def _import(name: str) -> object:
    module_name, colon, path = name.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(
            f"{_FIELD}: {name!r} is not a class name of the form 'package.module:Class'",
            field=_FIELD,
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{_FIELD}: {name!r}: the module {module_name!r} could not be imported: "
            f"{type(error).__name__}: {error}",
            field=_FIELD,
        ) from error
    found: object = module
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(
                f"{_FIELD}: {name!r}: the module {module_name!r} has no {path!r}", field=_FIELD
            )
        found = getattr(found, part)
    return found


def _checked(name: object, found: object) -> type[LogitsProcessor]:
    if isinstance(found, type) and issubclass(found, LogitsProcessor):
        return found
    raise ConfigError(
        f"{_FIELD}: {name!r} is not a subclass of headrace.logits_process.LogitsProcessor",
        field=_FIELD,
    )
