"""Blocks that a step saves and loads: plain data from the scheduler to the worker."""

from __future__ import annotations

from typing import NamedTuple

from headrace_core.kv import KVCacheConfig

MOVES = "kv_moves"
"""Key of a step's :class:`KVMoves` in ``ScheduledStep.connector_metadata``."""


class KVMove(NamedTuple):
    """One block that goes to a connector, or comes from it."""

    group: int
    block_id: int
    key: bytes
    """32 bytes; see :class:`headrace_core.kv.KVConnector`."""


class KVMoves(NamedTuple):
    """A step's moves, in the order in which the worker makes them."""

    epoch: int
    """Rises with every step that failed, once the scheduler knows."""
    saved_first: list[KVMove]
    """Before anything else: the pool gave these blocks up, and the step overwrites them."""
    loaded: list[KVMove]
    """Before the model runs."""
    saved: list[KVMove]
    """Once it has run: they are full then."""


def block_sizes(config: KVCacheConfig) -> list[int]:
    """By cache group: bytes of a block, over all of its layers, on one rank."""
    return [len(group.layer_names) * config.page_bytes(group.pool) for group in config.groups]
