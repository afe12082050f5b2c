"""Checks of a checkpoint's ``quantization_config``: refusals by key and value."""

from __future__ import annotations

from headrace_core.errors import ConfigError


def refusal(key: str, value: object, accepted: str) -> ConfigError:
    """Error for a value that is not supported."""
    return ConfigError(f"quantization_config: {key} = {value!r:.200}: must be {accepted}")


def listed_names(key: str, value: object) -> list[str]:
    """The value, if it is a list of modules' names, or of patterns of them.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal(key, value, "a list of names")
    return value
