"""Ops by name: those that few families need, and those of outside packages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Signature = TypeVar("Signature", covariant=True)


@dataclass(frozen=True, slots=True)
class OptionalOp(Generic[Signature]):
    """An op that is not a field of the :class:`~headrace_core.ops.OpTable`: its name, and as a type the
    protocol that an implementation fulfils.

    A layer binds it as it is built: ``self.xielu = context.ops.optional(XIELU)``. Kernel providers offer it
    in ``operations`` by its name.
    """

    name: str
