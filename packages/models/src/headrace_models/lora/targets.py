"""Where factors go: weights of layers, and the parts of them that one rank keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace_core.errors import WeightsError
from headrace_core.model import WeightRule
from headrace_models.loading.mapping import parts_of, stored_shape
from headrace_models.loading.pieces import piece_of
from headrace_models.lora.files import Factors
from headrace_models.lora.places import Place

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.layers.base import Slot


class Piece(NamedTuple):
    """Factors for one part of one layer, as this rank keeps them."""

    place: Place
    key: str
    """Name of the weight below the layer."""
    part: int
    factors: Factors


class Target(NamedTuple):
    """A weight of a layer, which is one of a module's, or some of its rows."""

    place: Place
    key: str
    rule: WeightRule
    rows: Tensor | None
    """Outputs of the module that are this weight's rows; None: all, in their order."""


def pieces_of(target: Target, module: str, factors: Factors, file: Path) -> Iterator[Piece]:
    """The weight's parts that a module's factors are for.

    Raises: WeightsError: the module has another shape.
    """
    slot = target.place.slots()[target.key]
    parts = parts_of(slot, target.rule)
    up = factors.up if target.rows is None else factors.up[target.rows]
    outputs, inputs = stored_shape(slot, parts, target.rule)
    check_shape((outputs, inputs), (len(up), factors.down.shape[1]), module, file)
    down = _columns(slot, factors.down)
    of_up = replace(slot, shape=(slot.shape[0], factors.rank), in_dim=None)
    for part in parts:
        own = factors._replace(down=down, up=piece_of(of_up, part, up, target.rule))
        yield Piece(target.place, target.key, part, own)


def _columns(slot: Slot, down: Tensor) -> Tensor:
    """This rank's inputs of a factor [rank, in]."""
    size = slot.shape[1]
    return down.narrow(1, slot.in_shard.index * size, size)


def check_shape(wanted: Sequence[int], sizes: Sequence[int], module: str, file: Path) -> None:
    """Raises: WeightsError: the model's weight and a module's are not of one shape."""
    if tuple(wanted) != tuple(sizes):
        raise WeightsError(
            f"{file}: factors of {module!r} are of a weight {list(sizes)} [out, in], the model's is "
            f"{list(wanted)}"
        )
