"""Images of any resolution as tiles of a tower's size: a small picture of the whole, then the tiles of the
canvas, out of a list of canvases, that fits the image best.

Liu et al. 2024, "LLaVA-NeXT"; Li et al. 2024, arXiv:2408.03326.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

Size = tuple[int, int]
"""Height and width."""


def canvases(whole: Mapping[str, Any], default: Sequence[Size], tile: int) -> Sequence[Size]:
    """``image_grid_pinpoints`` of a config.

    Args:
        default: where it has none.
        tile: side of a tile.

    Raises:
        UnsupportedModel: a canvas is not made of whole tiles.
    """
    stated = whole.get("image_grid_pinpoints")
    if stated is None:
        stated = default
    good = isinstance(stated, Sequence) and bool(stated)
    if not good or not all(
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(side) is int and side > 0 and side % tile == 0 for side in size)
        for size in stated
    ):
        raise UnsupportedModel(
            f"config.json: image_grid_pinpoints = {stated!r:.200}: must be heights and widths in multiples "
            f"of vision_config.image_size = {tile}"
        )
    return [(height, width) for height, width in stated]


def best_canvas(image: Size, sizes: Sequence[Size]) -> Size:
    """The canvas that keeps most of the image's pixels; among equals, the one of which least is wasted."""
    height, width = image

    def worth(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=worth)


def one_plane(tiles: Tensor, rows: int, columns: int, side: int) -> Tensor:
    """tiles [rows * columns, side * side, H] -> [rows * side, columns * side, H]."""
    blocks = tiles.reshape(rows, columns, side, side, -1).transpose(1, 2)
    return blocks.reshape(rows * side, columns * side, -1)


Scaled = Callable[[int, int, int], int]
"""(length, new, old) -> about length * new / old."""


def rounded(length: int, new: int, old: int) -> int:
    """Cut off behind a product that is rounded to seven places."""
    return int(round(length * (new / old), 7))


def exact(length: int, new: int, old: int) -> int:
    """Cut off in whole numbers."""
    return length * new // old


def cut_off(length: int, new: int, old: int) -> int:
    """Cut off behind a product of floats."""
    return int(length * (new / old))


def unpadded(plane: Tensor, image: Size, scaled: Scaled = rounded) -> Tensor:
    """plane [rows, columns, H] without what stands for the margins around an image of another shape.

    Args:
        scaled: says how much of the plane is no margin.
    """
    rows, columns, _ = plane.shape
    height, width = image
    if width / height > columns / rows:
        margin = (rows - scaled(height, columns, width)) // 2
        return plane[margin : rows - margin]
    margin = (columns - scaled(width, rows, height)) // 2
    return plane[:, margin : columns - margin]


def reduced(plane: Tensor, most: int) -> Tensor:
    """plane [rows, columns, H], interpolated if it is more than 1.1 times as long and as wide as ``most``
    vectors would be."""
    rows, columns, _ = plane.shape
    ratio = math.sqrt(rows * columns / most)
    if ratio <= 1.1:
        return plane
    size = [int(rows // ratio), int(columns // ratio)]
    found = torch.nn.functional.interpolate(plane.permute(2, 0, 1)[None], size, mode="bilinear")
    return found[0].permute(1, 2, 0)


def halved(planes: Tensor) -> Tensor:
    """planes [P, rows, columns, H], interpolated to half as many rows and columns, rounded up."""
    size = [math.ceil(planes.shape[1] / 2), math.ceil(planes.shape[2] / 2)]
    found = torch.nn.functional.interpolate(planes.permute(0, 3, 1, 2), size, mode="bilinear")
    return found.permute(0, 2, 3, 1)


def with_row_ends(plane: Tensor, end: Tensor) -> Tensor:
    """plane [rows, columns, H] -> [rows * (columns + 1), H]: each row, then ``end`` [H]."""
    rows = plane.shape[0]
    return torch.cat((plane, end.expand(rows, 1, -1)), dim=1).flatten(0, 1)
