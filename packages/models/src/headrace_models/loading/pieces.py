"""The piece of a checkpoint's tensor that one rank keeps as one part of a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.errors import WeightsError
from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.layers.base import Slot
from headrace_models.loading.mapping import is_transposed, parts_of

if TYPE_CHECKING:
    from torch import Tensor


def piece_of(slot: Slot, part: int, tensor: Tensor, rule: WeightRule) -> Tensor:
    """The piece; a view."""
    if is_transposed(slot, rule) and tensor.dim() == 2:
        tensor = tensor.T
    if rule.split is not None:
        tensor = _cut_part(slot, part, tensor, rule)
    return _cut_shard(slot, part, tensor)


def _cut_part(slot: Slot, part: int, tensor: Tensor, rule: WeightRule) -> Tensor:
    """One part of a checkpoint tensor that holds several."""
    if not slot.parts or slot.part_dim is None:
        return tensor
    stored = parts_of(slot, rule)
    sizes = {p: slot.parts[p].whole for p in stored}
    groups = rule.groups
    if rule.interleaved:
        groups = sizes[part]
    elif groups == EACH_KV_HEAD:
        groups = min(slot.parts[p].units for p in stored)
    if any(size % groups for size in sizes.values()):
        raise WeightsError(
            f"{rule.source}: parts of {list(sizes.values())} rows are not {groups} equal groups"
        )
    start = sum(sizes[other] for other in stored[: stored.index(part)]) // groups
    dim, shape = slot.part_dim, tensor.shape
    groupwise = tensor.reshape(*shape[:dim], groups, -1, *shape[dim + 1 :])
    return groupwise.narrow(dim + 1, start, sizes[part] // groups).flatten(dim, dim + 1)


def _cut_shard(slot: Slot, part: int, tensor: Tensor) -> Tensor:
    """This rank's piece of one part."""
    if slot.parts and slot.part_dim is not None:
        own = slot.parts[part]
        tensor = tensor.narrow(slot.part_dim, own.start, own.size)
    if slot.in_dim is not None:
        size = slot.shape[slot.in_dim]
        tensor = tensor.narrow(slot.in_dim, slot.in_shard.index * size, size)
    return tensor
