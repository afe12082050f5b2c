"""A user's own methods of the workers, which ``collective_rpc`` may call by their names."""

from __future__ import annotations

import importlib
from typing import TypeVar

from headrace_core.errors import ConfigError

FIELD = "parallel.worker_extension_cls"

WorkerT = TypeVar("WorkerT")


def load_extension(name: str) -> type | None:
    """The class of a worker extension; None: there is none.

    Args:
        name: ``package.module:Class`` or ``package.module.Class``; "": none.

    Raises:
        ConfigError: it cannot be imported, or is no class with public methods.
    """
    if not name:
        return None
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    if not module or not path:
        raise _wrong(name, "must be 'package.module:Class'")
    try:
        found = importlib.import_module(module)
        extension: object = found
        for part in path.split("."):
            extension = getattr(extension, part)
    except Exception as error:
        raise _wrong(name, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(extension, type) or not extension_methods(extension):
        raise _wrong(name, "must be a class with public methods")
    return extension


def extension_methods(extension: type) -> frozenset[str]:
    """Names of its public methods."""
    return frozenset(
        name
        for name in dir(extension)
        if not name.startswith("_") and callable(getattr(extension, name))
    )


def extended(worker: type[WorkerT], extension: type | None) -> type[WorkerT]:
    """The worker's class with an extension's methods.

    Raises:
        ConfigError: a name is one that the worker has already.
    """
    if extension is None:
        return worker
    both = {name for name in vars(extension) if not name.startswith("__")} & set(dir(worker))
    if both:
        raise _wrong(
            f"{extension.__module__}:{extension.__qualname__}",
            f"{', '.join(sorted(both))}: must have other names, which the worker does not have itself",
        )
    return type(f"{worker.__name__}With{extension.__name__}", (worker, extension), {})


def _wrong(name: str, reason: str) -> ConfigError:
    return ConfigError(f"{FIELD} = {name!r}: {reason}", field=FIELD)
