"""Which ranks belong to which group: pure arithmetic on the sizes of the parallel axes.

Global ranks form a grid, data x pipeline x prefill context x tensor, the last axis innermost: adjacent
ranks share a layer, and so should share a host. Decode-context groups divide a tensor group and add no
ranks. Experts are spread over all ranks of one pipeline stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from headrace_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Numbers of ranks along each axis.

    Raises:
        ConfigError: a size is below 1, or ``decode_context`` does not divide ``tensor``.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    prefill_context: int = 1
    decode_context: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size < 1:
                name = f"{field.name}_parallel_size"
                raise ConfigError(f"{name} = {size!r} must be 1 or more", field=name)
        if self.tensor % self.decode_context:
            raise ConfigError(
                f"decode_context_parallel_size = {self.decode_context} must divide "
                f"tensor_parallel_size = {self.tensor}",
                field="decode_context_parallel_size",
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data * self.pipeline * self.prefill_context * self.tensor

    @property
    def engine_size(self) -> int:
        """Ranks of one engine: one of ``data`` replicas."""
        return self.world_size // self.data


@dataclass(frozen=True, slots=True)
class Group:
    """Some ranks that talk to each other, in the order of their ranks within the group."""

    name: str
    """Prefix and number, unique in the world: ``tp:0``."""
    ranks: tuple[int, ...]
    """Global ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def rank_of(self, rank: int) -> int:
        """The rank within the group of a global rank.

        Raises:
            ValueError: the rank is not of this group.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in group {self.name!r} of {list(self.ranks)}")
        return self.ranks.index(rank)

    def next_rank(self, rank: int) -> int:
        """The global rank after a global rank; the first after the last."""
        return self.ranks[(self.rank_of(rank) + 1) % self.world_size]

    def previous_rank(self, rank: int) -> int:
        """The global rank before a global rank; the last before the first."""
        return self.ranks[self.rank_of(rank) - 1]


AXES: Mapping[str, tuple[int, ...]] = {
    "tp": (3,), "pcp": (2,), "pp": (1,), "dp": (0,), "ep": (0, 2, 3),
}  # fmt: skip
"""Prefix -> the axes of the grid (data, pipeline, prefill context, tensor) along which its groups lie."""


def parallel_groups(sizes: ParallelSizes) -> Mapping[str, tuple[Group, ...]]:
    """All groups by prefix: ``world``, ``tp``, ``dcp``, ``pcp``, ``pp``, ``dp``, ``ep``.

    Each rank is in exactly one group of each prefix. With ``tensor=2, pipeline=4`` the groups ``tp`` are
    ``[0, 1] [2, 3] [4, 5] [6, 7]`` and the groups ``pp`` are ``[0, 2, 4, 6] [1, 3, 5, 7]``.
    """
    shape = (sizes.data, sizes.pipeline, sizes.prefill_context, sizes.tensor)
    found = {"world": _named("world", [tuple(range(sizes.world_size))])}
    for prefix, axes in AXES.items():
        found[prefix] = _named(prefix, _along(shape, axes))
    step = sizes.decode_context
    parts = [
        group.ranks[start : start + step]
        for group in found["tp"]
        for start in range(0, sizes.tensor, step)
    ]
    return {**found, "dcp": _named("dcp", parts)}


def groups_of(rank: int, sizes: ParallelSizes) -> Mapping[str, Group]:
    """The groups of one global rank, by prefix.

    Raises:
        ValueError: there is no such rank.
    """
    if not 0 <= rank < sizes.world_size:
        raise ValueError(f"rank {rank} must be within 0 and {sizes.world_size - 1}")
    return {
        prefix: next(group for group in groups if rank in group.ranks)
        for prefix, groups in parallel_groups(sizes).items()
    }


def _named(prefix: str, groups: Sequence[tuple[int, ...]]) -> tuple[Group, ...]:
    return tuple(Group(f"{prefix}:{number}", ranks) for number, ranks in enumerate(groups))


def _along(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Ranks of a grid that differ in these axes only, for each place along the others."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    inner = list(_offsets(shape, strides, axes))
    return [tuple(start + offset for offset in inner) for start in _offsets(shape, strides, others)]


def _offsets(
    shape: Sequence[int], strides: Sequence[int], axes: tuple[int, ...], start: int = 0
) -> Iterator[int]:
    """Sums of steps along the axes, the last axis fastest."""
    if not axes:
        yield start
        return
    for step in range(shape[axes[0]]):
        yield from _offsets(shape, strides, axes[1:], start + step * strides[axes[0]])
