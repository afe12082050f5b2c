"""Places of patches in an image, and rotation by them. Letters: T patches, D head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings

_THETA = 10_000.0


def places(height: int, width: int, merge: int = 1) -> Tensor:
    """[height * width, 2] int64: row and column of each patch.

    Args:
        merge: squares of ``merge * merge`` patches come one after the other, and so do their patches;
            1: row by row.
    """
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    both = torch.stack((rows, columns), dim=-1)
    squares = both.view(height // merge, merge, width // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def frequencies(theta: float, count: int, first: int = 0, step: int = 1) -> Tensor:
    """[ceil((count - first) / step)] float32: ``theta ** (-i / count)`` for i = first, first + step ..."""
    return 1.0 / theta ** (torch.arange(first, count, step, dtype=torch.float32) / count)


def rotary_rows(places: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """[T, D]: half cosines, half sines; in each half first the angles by row, then those by column.

    Args:
        places: [T, 2].
        by_row, by_column: [D/4] each, frequencies.
    """
    rows, columns = places.float().unbind(-1)
    angles = torch.cat((rows[:, None] * by_row, columns[:, None] * by_column), dim=-1)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def axial_theta(stated: Mapping[str, Any]) -> float:
    """Base of the rotation, by a tower's part of the config.

    Raises: UnsupportedModel: it is of another kind.
    """
    written = (stated.get("rope_parameters"), stated.get("rope_scaling"))
    block: Mapping[str, Any] = next((one for one in written if isinstance(one, Mapping)), {})
    kind = block.get("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise UnsupportedModel(
            f"config.json: vision_config.rope_type = {kind!r}: must be axial or default"
        )
    return Settings(block).positive("rope_theta", Settings(stated).positive("rope_theta", _THETA))
