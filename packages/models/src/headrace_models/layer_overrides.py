"""A quantization method with others for the layers that the user names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops import OpTable

_FIELD = "model.quantization_overrides"


class LayerOverrides(QuantMethod):
    """Each layer by the method of the first entry that names it, all others by the default.

    Args:
        default: of layers that no entry names, and of everything that is no linear layer.
        entries: (a full name, the beginning of one up to a dot, or a pattern after ``re:``; method).
    """

    name: ClassVar[str] = "overrides"

    def __init__(self, default: QuantMethod, entries: Sequence[tuple[str, QuantMethod]]) -> None:
        self.default, self.entries = default, entries
        self._patterns = [_pattern(entry) for entry, _ in entries]
        self._unused = {entry for entry, _ in entries}
        self._seen: list[str] = []

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> QuantMethod:
        raise NotImplementedError("is made of methods")

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        """Raises: ConfigError: an entry names some of a fused layer's modules, and not the others."""
        names = spec.part_names or (spec.name,)
        self._seen += names
        found = {name: self._entry_of(name) for name in names}
        if len(set(found.values())) > 1:
            said = ", ".join(f"{name}: {self._said(at)}" for name, at in found.items())
            raise ConfigError(
                f"{_FIELD}: {said}; these modules are one layer ({spec.name}) here: name all of them, or "
                "none",
                field=_FIELD,
            )
        at = found[names[0]]
        return (self.default if at is None else self.entries[at][1]).for_layer(spec)

    def for_table(self, spec: LinearSpec) -> LinearMethod | None:
        return self.default.for_table(spec)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Raises: ConfigError: an entry names no layer of the model; names the nearest."""
        for entry in sorted(self._unused):
            seen = list(dict.fromkeys(self._seen))
            near = difflib.get_close_matches(entry, seen, 3, 0.5) or seen[:3]
            raise ConfigError(
                f"{_FIELD}: {entry!r} is no linear layer of the model; it has {', '.join(near)} and others",
                field=_FIELD,
            )
        return self.default.decode(tensors, dtype, passes_over)

    def _entry_of(self, name: str) -> int | None:
        """Place of the first entry that means a module."""
        for at, pattern in enumerate(self._patterns):
            if pattern.match(name):
                self._unused.discard(self.entries[at][0])
                return at
        return None

    def _said(self, at: int | None) -> str:
        return "no entry" if at is None else repr(self.entries[at][0])


def _pattern(entry: str) -> re.Pattern[str]:
    """Raises: ConfigError: what stands after ``re:`` is not a pattern."""
    if not entry.startswith("re:"):
        return re.compile(re.escape(entry) + r"(\.|$)")
    try:
        return re.compile(entry[3:])
    except re.error as error:
        raise ConfigError(f"{_FIELD}: {entry!r} is not a pattern: {error}", field=_FIELD) from error
