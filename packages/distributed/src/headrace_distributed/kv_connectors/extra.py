"""Settings of one connector: ``kv_connector_extra_config``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError

EXTRA = "cache.kv_transfer_config.kv_connector_extra_config"


def wrong(name: str, value: object, accepted: str) -> ConfigError:
    """An error that names a setting, its value, and what would be accepted."""
    return ConfigError(f"{EXTRA}.{name} = {value!r}: must be {accepted}", field=f"{EXTRA}.{name}")


def extra_of(settings: Mapping[str, Any], *known: str) -> Mapping[str, Any]:
    """The settings of the connector itself.

    Raises:
        ConfigError: one is not among ``known``.
    """
    extra: Mapping[str, Any] = settings["kv_connector_extra_config"]
    for name in sorted(set(extra) - set(known)):
        raise wrong(name, extra[name], f"left out: there are {', '.join(known)}")
    return extra


def number_of_bytes(extra: Mapping[str, Any], name: str) -> int | None:
    """A size; None: it is left out.

    Raises:
        ConfigError: it is no number, or below 1.
    """
    value = extra.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 1 <= value < float("inf"):
        raise wrong(name, value, "bytes, at least 1")
    return int(value)


def folder_of(extra: Mapping[str, Any], name: str, *, writes: bool) -> Path | None:
    """A folder that can be used, made if need be; None: it is left out.

    Raises:
        ConfigError: it is no text, or cannot be read, or written where that is wanted.
    """
    stated = extra.get(name)
    if stated is None:
        return None
    if not isinstance(stated, str) or not stated:
        raise wrong(name, stated, "a folder")
    folder = Path(stated)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if writes:
            tempfile.TemporaryFile(dir=folder).close()
        os.listdir(folder)
    except OSError as error:
        raise wrong(name, stated, f"a folder to use: {error.strerror}") from error
    return folder
