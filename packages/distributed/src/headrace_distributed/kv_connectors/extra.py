"""Settings of one connector: ``kv_connector_extra_config``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError

FIELD = "cache.kv_transfer_config"
EXTRA = FIELD + ".kv_connector_extra_config"
OF_PEERS = ("kv_ip", "kv_port", "kv_buffer_size")
"""Settings of connectors that talk to other engines."""


def wrong(name: str, value: object, accepted: str) -> ConfigError:
    """An error that names a setting, its value, and what would be accepted."""
    return ConfigError(f"{EXTRA}.{name} = {value!r}: must be {accepted}", field=f"{EXTRA}.{name}")


def extra_of(
    settings: Mapping[str, Any], *known: str, has_peers: bool = False
) -> Mapping[str, Any]:
    """The settings of the connector itself.

    Args:
        has_peers: :data:`OF_PEERS` have a meaning.

    Raises:
        ConfigError: one is not among ``known``, or has no meaning.
    """
    for name in OF_PEERS:
        if name in settings and not has_peers:
            raise ConfigError(
                f"{FIELD}.{name} = {settings[name]!r}: must be left out for this connector, which has no "
                "peers",
                field=f"{FIELD}.{name}",
            )
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
