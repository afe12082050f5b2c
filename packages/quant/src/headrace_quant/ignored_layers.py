"""A layer's modules by the checkpoint's names of them: lists of those to leave alone, and fused ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec

if TYPE_CHECKING:
    from torch import Tensor


def module_names(spec: LinearSpec) -> tuple[str, ...]:
    """The checkpoint's names of a layer: its fused parts', or its own."""
    return spec.part_names or (spec.name,)


class PartCounts:
    """Numbers of parts of layers that are one module in the checkpoint, and so have one scale there."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def note(self, spec: LinearSpec) -> None:
        """Remember a layer."""
        if not spec.part_names:
            self._counts[spec.name] = max(1, len(spec.out_parts))

    def spread(self, module: str, scale: Tensor) -> Tensor:
        """A module's scale of one number as one for each part [parts]; other tensors as they are."""
        return scale.reshape(1).expand(self._counts.get(module, 1)) if scale.numel() == 1 else scale


def is_listed(name: str, entries: Sequence[str]) -> bool:
    """True if a list of plain modules has the module of a name.

    An entry is a full name, a prefix of one that ends at a dot, or a pattern after ``re:``.

    Raises:
        ConfigError: a pattern is malformed.
    """
    return any(matches(entry, name) for entry in entries)


def matches(entry: str, name: str) -> bool:
    """True if one entry means a module of that name."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], name) is not None
        except re.error as error:
            raise ConfigError(
                f"quantization_config: {entry!r} is not a pattern: {error}"
            ) from error
    return name == entry or name.startswith(f"{entry}.")
