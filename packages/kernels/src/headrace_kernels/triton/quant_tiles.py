"""Shapes of the programs of :mod:`headrace_kernels.triton.quant_kernels`, as data.

Nothing is tuned while a server runs: which kernel multiplies a row would depend on what came before it. The
numbers below are estimates from the sizes of registers and shared memory; none was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantTile:
    """Shape of one program, and how many there should be."""

    block_m: int
    """Rows."""
    block_n: int
    """Outputs."""
    num_warps: int = 4
    num_stages: int = 3
    """Loads that are ahead of the products."""
    programs: int = 0
    """Inputs are split until so many programs run; 0: never. The number of rows has no part in it, so a
    row's sum has one order."""


FEW_ROWS, SOME_ROWS = 4, 32
"""Most rows of the classes ``few`` and ``some``; ``many`` has no end."""

DEFAULTS: Mapping[str, QuantTile] = {
    "few": QuantTile(4, 64, num_warps=8, programs=528),
    "some": QuantTile(16, 64, programs=264),
    "many": QuantTile(64, 128, num_warps=8),
}
"""By class of rows, for bits that :data:`TILES` does not name. ``few`` adds products without tensor cores.
264 and 528 programs are two and four for each multiprocessor of an H100."""

TILES: Mapping[tuple[str, int], QuantTile] = {
    # A byte of 2 bits makes four tiles, and as many tiles of activations lie ahead.
    ("few", 2): QuantTile(4, 64, num_warps=8, num_stages=2, programs=528),
    ("few", 3): QuantTile(4, 64, num_warps=8, num_stages=2, programs=528),
    # A tile has as many bytes as one of 4 bits has for two: wider rows of them.
    ("some", 8): QuantTile(16, 128, programs=264),
}
"""By class of rows and bits of a code."""

INTERPRETED: Mapping[str, QuantTile] = {
    "few": QuantTile(4, 256),
    "some": QuantTile(32, 256),
    "many": QuantTile(64, 256),
}
"""For Triton's interpreter, where each program takes milliseconds, however large it is."""


def rows_class(rows: int) -> str:
    """``few``, ``some`` or ``many``."""
    return "few" if rows <= FEW_ROWS else "some" if rows <= SOME_ROWS else "many"


def tile_for(kind: str, bits: int) -> QuantTile:
    """Tile of a class of rows, compiled."""
    return TILES.get((kind, bits), DEFAULTS[kind])
