"""Ranks of engines that give blocks to each other: each gives and takes the parts of blocks that it has.

A rank listens at its engine's port plus its number. Parts are found by their keys, so a rank need only know
which of another engine's ranks may have those that it wants: with as many ranks the one of its own number;
with others those whose share of the heads overlaps its own. Of latent attention the first one that is asked
has everything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError
from headrace_distributed.kv_connectors.extra import FIELD

_LAYOUT = struct.Struct("<HHIH")
LAYOUT_BYTES = _LAYOUT.size
MAX_RANKS = 64


class RankLayout(NamedTuple):
    """A rank's place in its engine, and how blocks are divided there."""

    rank: int = 0
    num_ranks: int = 1
    block_size: int = 0
    """Tokens of a block; 0: not said."""
    head_parts: int = 1
    """Parts of a block at most: see ``kv_head_parts``."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RankLayout:
        """The layout of a connector's settings."""
        num_ranks = settings.get("num_ranks", 1)
        parts = settings.get("kv_head_parts") or num_ranks
        return cls(settings.get("rank", 0), num_ranks, settings.get("block_size") or 0, parts)

    def pack(self) -> bytes:
        """As :meth:`unpack` reads it: u16 rank, u16 ranks, u32 block size, u16 parts, little-endian."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> RankLayout:
        """Raises: struct.error: it has another length."""
        return cls(*_LAYOUT.unpack(data))

    def ranks_to_ask(self, num_ranks: int) -> range:
        """Ranks of an engine with so many that have heads of this one."""
        start, end = self.rank * num_ranks, (self.rank + 1) * num_ranks
        return range(start // self.num_ranks, -(-end // self.num_ranks))

    def refusal(self, other: RankLayout) -> str:
        """Why this rank can take nothing from another one; "": it can."""
        sizes = other.block_size, self.block_size
        if all(sizes) and sizes[0] != sizes[1]:
            return f"its block_size is {sizes[0]}, and this engine's {sizes[1]}: they must be equal"
        return ""


def rank_port(port: int, layout: RankLayout) -> int:
    """The port at which a rank listens.

    Raises:
        ConfigError: the ranks have no ports side by side.
    """
    last = 65536 - layout.num_ranks
    if layout.num_ranks > 1 and not 0 < port <= last:
        raise ConfigError(
            f"{FIELD}.kv_port = {port}: must be in 1..{last} with {layout.num_ranks} ranks, which listen at "
            "this port and the next ones",
            field=f"{FIELD}.kv_port",
        )
    return port + layout.rank
