"""Scales of a one-byte cache: what a stored 1 stands for, and how it is chosen by measuring.

``scale = largest measured magnitude / constant``: the largest value that was seen is stored as the
constant, and what lies between the constant and the end of the dtype's range is headroom for
values that were not seen. Beyond the range a value is clamped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from headrace_core.attention import LARGEST
from headrace_core.errors import ConfigError

K_VARIABLE, V_VARIABLE = "K_SCALE_CONSTANT", "V_SCALE_CONSTANT"
"""Environment variables that replace the constants. Without a prefix: users have them set."""


class ScaleConstants(NamedTuple):
    """The stored numbers of the largest measured key and the largest measured value."""

    k: float
    v: float


FLOAT8_CONSTANTS = ScaleConstants(200.0, 100.0)
"""A float's relative error is the same wherever in its range it lies: headroom costs nothing."""

INT8_CONSTANTS = ScaleConstants(90.0, 90.0)
"""127 / sqrt(2). Steps of int8 are of one size, so headroom makes them larger, and must be small.

Rotation mixes pairs of a key's dimensions: at a position that was not measured the larger of two
can become sqrt(2) times as large, and no larger. Values are not rotated; those of real text
reached 1.44 times what was measured (docs/adr/0020).
"""


def scale_constants(dtype: str, environ: Mapping[str, str]) -> ScaleConstants:
    """The constants for a cache of ``dtype`` (:data:`LARGEST`), by default or from the environment.

    Raises:
        ConfigError: a variable is no number of at least 1, or beyond what the dtype can store.
    """
    default = INT8_CONSTANTS if dtype == "int8" else FLOAT8_CONSTANTS
    return ScaleConstants(
        _constant(K_VARIABLE, environ, default.k, dtype),
        _constant(V_VARIABLE, environ, default.v, dtype),
    )


def _constant(variable: str, environ: Mapping[str, str], default: float, dtype: str) -> float:
    text = environ.get(variable, "")
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= LARGEST[dtype]:  # false for NaN, too
        raise ConfigError(
            f"environment variable {variable} = {text!r}: must be a number between 1 and "
            f"{LARGEST[dtype]:g}, the largest that a cache of {dtype} stores",
            field="cache.calculate_kv_scales",
        )
    return number
