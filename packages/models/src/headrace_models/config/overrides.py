"""Changes that a user makes to ``config.json``: a mapping that is merged into it, or a function. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace_core.errors import ConfigError
from headrace_models.config.rope import respelled

_FIELD = "model.hf_overrides"


def overridden(
    stated: Mapping[str, Any], overrides: Mapping[str, Any] | Callable[[dict[str, Any]], Any]
) -> dict[str, Any]:
    """``config.json`` as the user wants it.

    Args:
        stated: as the checkpoint says it; stays as it is.
        overrides: merged in, in the checkpoint's spelling; or a function that gets a copy and
            returns what replaces it, None for the copy itself, changed in place.

    Raises:
        ConfigError: the function failed, or gave no JSON object.
    """
    if isinstance(overrides, Mapping):
        return merged(stated, respelled(overrides, stated))
    copy = json.loads(json.dumps(stated))
    try:
        returned = overrides(copy)
    except Exception as error:
        raise ConfigError(
            f"{_FIELD}: {_name(overrides)} failed: {type(error).__name__}: {error}", field=_FIELD
        ) from error
    return _as_json(_name(overrides), copy if returned is None else returned)


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``overrides``; nested objects are merged, everything else replaced."""
    result = dict(config)
    for key, value in overrides.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return result


def _as_json(name: str, returned: object) -> dict[str, Any]:
    """The config that a function returned, as a file could hold it: another process, and readers who know
    only what JSON has, must see the same."""
    accepted = "must be the whole config as a mapping, or None if it was changed in place"
    if not isinstance(returned, Mapping):
        raise ConfigError(f"{_FIELD}: {name} returned {returned!r:.200}: {accepted}", field=_FIELD)
    try:
        whole: dict[str, Any] = json.loads(json.dumps(dict(returned)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{_FIELD}: {name} returned values that JSON cannot express ({error}): {accepted}, of "
            "values that config.json could have",
            field=_FIELD,
        ) from error
    return whole


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
