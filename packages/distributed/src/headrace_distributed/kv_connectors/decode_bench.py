"""The connector ``decode-bench``: finds every block, filled with one number, to measure decoding behind long
prompts that nobody computed. Outputs mean nothing."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from headrace_core.errors import ConfigError
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.extra import extra_of, wrong

MEAN = "fill_mean"
DEFAULT_MEAN = 0.015


class DecodeBenchConnector(KVConnector):
    """Blocks are filled with ``fill_mean``, as bfloat16: repeated, its bytes are about the same number in
    float32, and finite ones in other dtypes.

    Raises:
        ConfigError: ``fill_mean`` is no number above zero, or the role is not ``kv_consumer``.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        role = settings["kv_role"]
        if role != "kv_consumer":
            raise ConfigError(
                f"cache.kv_transfer_config.kv_role = {role!r}: must be kv_consumer: decode-bench saves "
                "nothing",
                field="cache.kv_transfer_config.kv_role",
            )
        mean = extra_of(settings, MEAN).get(MEAN, DEFAULT_MEAN)
        if type(mean) not in (int, float) or not (math.isfinite(mean) and 0 < mean <= 1):
            raise wrong(MEAN, mean, "a number above 0, at most 1")
        # The upper half of a float32 is a bfloat16.
        self._pattern = struct.pack("<f", mean)[2:]

    def contains(self, key: bytes) -> bool:
        return True

    def load(self, key: bytes, into: memoryview) -> bool:
        into[:] = (self._pattern * (into.nbytes // 2 + 1))[: into.nbytes]
        return True

    def save(self, key: bytes, content: memoryview) -> None:
        """Nothing is kept."""
