"""Engines of this server, by the engine's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def num_engines_here(settings: Mapping[str, Any]) -> int:
    """How many engines this server has; others may have more of the same (``data_parallel_rank``,
    ``data_parallel_start_rank``).

    Args:
        settings: of the engine.
    """
    parallel = settings.get("parallel", {})
    if parallel.get("data_parallel_rank") is not None:
        return 1
    return int(parallel.get("data_parallel_size_local") or parallel.get("data_parallel_size", 1))
