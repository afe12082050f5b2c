"""Ranks of engines that give blocks to each other: each gives and takes the parts of blocks that it has.

A rank listens at its engine's port plus its number. Parts are found by their keys, so a rank need only know
which of another engine's ranks may have those that it wants: with as many ranks and stages the one of its own
number; with others those whose share of the heads overlaps its own, of all stages, as each stage may have
some of its layers. Of latent attention the first one of a stage that is asked has everything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.errors import ConfigError
from headrace_distributed.kv_connectors.extra import FIELD

_LAYOUT = struct.Struct("<HHIHHB")
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
    num_stages: int = 1
    """Ranges of layers, each of as many neighbouring ranks."""
    by_layer: int = 0
    """1: each layer is a part of its own: see ``kv_by_layer``."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> RankLayout:
        """The layout of a connector's settings."""
        num_ranks, num_stages = settings.get("num_ranks", 1), settings.get("num_stages", 1)
        return cls(
            settings.get("rank", 0),
            num_ranks,
            settings.get("block_size") or 0,
            settings.get("kv_head_parts") or num_ranks // num_stages,
            num_stages,
            int(bool(settings.get("kv_by_layer"))),
        )

    @property
    def is_possible(self) -> bool:
        """True if there is such a place."""
        is_divided = self.num_stages > 0 and self.num_ranks % self.num_stages == 0
        return is_divided and self.rank < self.num_ranks <= MAX_RANKS

    @property
    def stage_size(self) -> int:
        """Ranks of each stage."""
        return self.num_ranks // self.num_stages

    def pack(self) -> bytes:
        """As :meth:`unpack` reads it: u16 rank, u16 ranks, u32 block size, u16 parts, u16 stages, u8 by
        layer, little-endian."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> RankLayout:
        """Raises: struct.error: it has another length."""
        return cls(*_LAYOUT.unpack(data))

    def ranks_to_ask(self, there: RankLayout) -> list[int]:
        """Ranks of another engine that may have parts of this one's, likely ones first.

        Args:
            there: of any of its ranks.
        """
        size, theirs = self.stage_size, there.stage_size
        stage, lane = divmod(self.rank, size)
        start, end = lane * theirs, (lane + 1) * theirs
        lanes = range(start // size, -(-end // size))
        near = stage * there.num_stages // self.num_stages
        same = there.num_stages == self.num_stages and not self.by_layer
        stages = (
            [near] if same else sorted(range(there.num_stages), key=lambda one: abs(one - near))
        )
        return [one * theirs + lane for one in stages for lane in lanes]

    def difference(self, other: RankLayout) -> str:
        """Why another engine has no part that this one asks for; "": it may have some."""
        if other.head_parts != self.head_parts:
            return (
                f"it divides blocks into {other.head_parts} parts, and this engine into {self.head_parts}: "
                "set kv_head_parts of both to the same"
            )
        if other.by_layer != self.by_layer or (
            other.num_stages != self.num_stages and not self.by_layer
        ):
            return (
                f"it has {other.num_stages} stages, and this engine {self.num_stages}: set kv_by_layer of "
                "both to true"
            )
        return ""

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
