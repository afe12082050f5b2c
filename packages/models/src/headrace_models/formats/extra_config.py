"""``--model-loader-extra-config``: settings that only one load format has. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError

_FIELD = "load.model_loader_extra_config"


def extra_config(load: LoadConfig, known: Mapping[str, type]) -> dict[str, Any]:
    """The settings that were given, each of the type that the format knows.

    Raises:
        ConfigError: a key is not known, or its value is of another type.
    """
    given = dict(load.model_loader_extra_config)
    for key, value in given.items():
        if key not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(
                f"{_FIELD}: {key!r}: load format {load.load_format!r} knows: {names}", field=_FIELD
            )
        wanted = known[key]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ConfigError(
                f"{_FIELD}: {key} = {value!r}: must be of type {wanted.__name__}", field=_FIELD
            )
        if isinstance(value, int) and wanted is int and value < 1:
            raise ConfigError(f"{_FIELD}: {key} = {value!r}: must be at least 1", field=_FIELD)
    return given
