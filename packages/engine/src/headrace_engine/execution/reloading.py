"""Settings that may change before a worker reads its weights again. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, RequestError

SECTION = "load_config"
FIELDS = ("load_format", "safetensors_load_strategy")
"""Fields of :class:`~headrace_core.config.LoadConfig` that may change. Not its extra config, which
may name files elsewhere: the call may come from a socket."""


def load_changes(changes: object) -> dict[str, str]:
    """Fields of the load configuration out of ``{"load_config": {"load_format": "auto"}}``.

    Raises:
        RequestError: it is something else, or a value that the field cannot have.
    """
    inner = changes.get(SECTION) if isinstance(changes, Mapping) else None
    if (
        not isinstance(changes, Mapping)
        or set(changes) != {SECTION}
        or not isinstance(inner, Mapping)
        or not all(key in FIELDS and isinstance(value, str) for key, value in inner.items())
    ):
        raise RequestError(
            f"args: {changes!r:.200}: must be {{{SECTION!r}: {{...}}}} with texts under "
            f"{' or '.join(FIELDS)}",
            param="args",
        )
    try:
        LoadConfig(**inner)  # what cannot be meant is refused while there is a model
    except ConfigError as error:
        raise RequestError(f"args: {error}", param="args") from error
    return dict(inner)
