"""Settings of recurrent layers, in the names that several families share."""

from __future__ import annotations

import math
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import MAX_HEAD_DIM, Settings
from headrace_models.layers.recurrent.mamba2 import Mamba2Sizes

MAX_TAPS = 64
"""Largest convolution; published ones have 2 to 5 taps."""


def step_limits(settings: Settings, name: str = "time_step_limit") -> tuple[float, float]:
    """Bounds of Mamba 2's step; infinity may be written as the number, as a word, or as transformers 5
    spells it. Default: none.

    Raises:
        UnsupportedModel: not two ascending numbers.
    """
    value = settings.config.get(name)
    if value is None:
        return 0.0, math.inf
    ends = [_number(end) for end in value] if isinstance(value, list | tuple) else []
    low, high = ends if len(ends) == 2 else (None, None)
    if low is None or high is None or not 0 <= low <= high:
        raise UnsupportedModel(
            f"config.json: {name} = {value!r:.200}: must be two ascending numbers of at least 0"
        )
    return low, high


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        value = value.get("__float__")
    if isinstance(value, str) and value.lower() in ("inf", "infinity"):
        return math.inf
    usable = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if (usable and -1e30 < value < 1e300) or value == math.inf else None


def layer_kinds(
    settings: Settings, *names: str, known: tuple[str, ...], count: int
) -> list[str] | None:
    """The kind of each layer under the first of the names that is there; None if none is.

    Raises:
        UnsupportedModel: not ``count`` of the ``known`` kinds.
    """
    name = next((n for n in names if settings.config.get(n) is not None), None)
    if name is None:
        return None
    value = settings.config[name]
    if not isinstance(value, list) or len(value) != count or any(v not in known for v in value):
        raise UnsupportedModel(
            f"config.json: {name} = {value!r:.200}: must be {count} entries out of "
            + ", ".join(known)
        )
    return value


def repeated_kinds(settings: Settings, name: str, default: tuple[str, ...]) -> list[str]:
    """A pattern of kinds that layers repeat.

    Args:
        default: if the key is absent; its entries are the known kinds.

    Raises:
        UnsupportedModel: not a list of known kinds.
    """
    value = settings.config.get(name)
    if value is None:
        return list(default)
    if not isinstance(value, list) or not value or any(kind not in default for kind in value):
        raise UnsupportedModel(
            f"config.json: {name} = {value!r:.200}: must be a list out of "
            + ", ".join(dict.fromkeys(default))
        )
    return value


def mamba2_sizes(settings: Settings, hidden_size: int) -> Mamba2Sizes:
    """Sizes of hybrids with Mamba 2 (Bamba, Granite 4, Falcon-H1), whose keys begin with ``mamba_``.

    Raises:
        UnsupportedModel: heads that do not make up the channels.
    """
    heads = settings.integer("mamba_n_heads", 128)
    expanded = int(settings.positive("mamba_expand", 2) * hidden_size)
    channels = settings.integer("mamba_d_ssm", expanded)
    size = settings.config.get("mamba_d_head", "auto")
    size = channels // heads if size in ("auto", None) else settings.integer("mamba_d_head")
    if size * heads != channels or size > MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"config.json: mamba_n_heads = {heads} times mamba_d_head = {size}: must be "
            f"{channels} channels"
        )
    return Mamba2Sizes(
        hidden_size=hidden_size,
        num_heads=heads,
        head_dim=size,
        num_groups=settings.integer("mamba_n_groups", 1),
        state_size=settings.integer("mamba_d_state", 256),
        taps=settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
    )
