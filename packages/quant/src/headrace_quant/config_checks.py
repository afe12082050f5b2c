"""Checks of a checkpoint's ``quantization_config``: refusals by key and value."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec
from headrace_quant.ignored_layers import module_names

logger = logging.getLogger(__name__)


def refusal(key: str, value: object, accepted: str) -> ConfigError:
    """Error for a value that is not supported."""
    return ConfigError(f"quantization_config: {key} = {value!r:.200}: must be {accepted}")


def uneven_inputs(spec: LinearSpec, tensor: str, size: int, what: str) -> ConfigError:
    """Error for a layer whose inputs, or a rank's share of them, do not end where groups or words do.

    Args:
        tensor: the first that cannot be cut: its name below the module's.
        size: inputs must be a multiple of it.
        what: so many inputs are; for the message.
    """
    return ConfigError(
        f"tensor '{module_names(spec)[0]}.{tensor}': a rank's in_features = {spec.in_features}: must be a "
        f"multiple of {size} ({what}). With one rank, quantization_config does not fit the model; with "
        "several, fewer of them (tensor_parallel_size) may have whole ones"
    )


def uneven_outputs(spec: LinearSpec, tensor: str, size: int, what: str) -> ConfigError:
    """As :func:`uneven_inputs`, for the first fused part whose outputs are no multiple of ``size``."""
    index, part = next((i, part) for i, part in enumerate(spec.out_parts) if part % size)
    names = module_names(spec)
    name = names[index] if len(names) == len(spec.out_parts) else names[0]
    return ConfigError(
        f"tensor '{name}.{tensor}': a rank's outputs = {part}: must be a multiple of {size} ({what}). Fewer "
        "ranks (tensor_parallel_size) may have whole ones"
    )


def listed_names(key: str, value: object) -> list[str]:
    """The value, if it is a list of modules' names, or of patterns of them.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal(key, value, "a list of names")
    return value


def warn_of_unknown(method: str, config: Mapping[str, object], known: Collection[str]) -> None:
    """Log the keys that no version of a format that we know has: a newer one may mean other numbers."""
    unknown = sorted(key for key in config if key not in known and config[key] is not None)
    if unknown:
        logger.warning(
            "quantization_config: %s: keys that %r is not known to have, and that change nothing here; check "
            "the answers",
            ", ".join(unknown),
            method,
        )
