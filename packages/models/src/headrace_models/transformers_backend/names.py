"""Names and tensors of a checkpoint turned into the module tree's, as transformers would rename and fuse
them.

Most names are the tree's own. For the others transformers keeps a list of renamings and of conversions
(many experts become one tensor, one fused projection several); they are followed here tensor by tensor,
so that the loader checks names, shapes and dtypes as it does for headrace's own classes.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core.errors import WeightsError
from headrace_models.transformers_backend.library import first_line

if TYPE_CHECKING:
    from torch import Tensor

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""A part of a name that counts."""
Stored = tuple[str, "Tensor", Path]
"""Name, tensor, and the file that it came from."""


@dataclass
class _Group:
    """Tensors that become, together, one target of a conversion, or several."""

    converter: Any
    tensors: dict[str, list[Stored]] = field(default_factory=dict)
    """Tensors by the converter's source pattern."""


class CheckpointNames:
    """The renamings and conversions of one tree.

    Args:
        tree: as built, before any of its modules is replaced.
    """

    def __init__(self, tree: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            GroupWeightRename,
            WeightConverter,
            WeightRenaming,
        )

        self.tree = tree
        self.prefix = tree.base_model_prefix
        self.wanted = dict(tree.state_dict())
        steps = get_model_conversion_mapping(tree)
        self.renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        self.converters = [step for step in steps if isinstance(step, WeightConverter)]
        self.order_matters = any(isinstance(step, GroupWeightRename) for step in steps)

    def translated(self, tensors: Iterable[Stored]) -> Iterator[Stored]:
        """The checkpoint's tensors under the tree's names; what is none of the tree's stays as it is.

        Raises:
            WeightsError: tensors that become one do not fit together; names one of them.
        """
        groups: dict[str, _Group] = {}
        for stored in sorted(tensors, key=_natural) if self.order_matters else tensors:
            name, pattern = self._renamed(stored[0])
            if pattern is None:
                yield (name if name in self.wanted else stored[0], *stored[1:])
                continue
            converter = next(c for c in self.converters if pattern in c.source_patterns)
            group = groups.setdefault(name, _Group(converter))
            group.tensors.setdefault(pattern, []).append(stored)
        for name, group in groups.items():
            yield from self._converted(name, group)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        renamed: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, self.prefix, self.wanted
        )
        if renamed[0] in self.wanted or name not in self.wanted:
            return renamed if renamed[0] in self.wanted else (name, None)
        plain: tuple[str, str | None] = rename_source_key(name, [], [], self.prefix, self.wanted)
        return plain

    def _converted(self, name: str, group: _Group) -> Iterator[Stored]:
        _check_alike(group)
        converter = copy.deepcopy(group.converter)
        file = next(iter(group.tensors.values()))[0][2]
        for pattern, stored in group.tensors.items():
            for source, tensor, _ in sorted(stored, key=_natural):
                converter.add_tensor(name, source, pattern, _as_callable(tensor))
        try:
            made = converter.convert(name, model=self.tree, config=self.tree.config)
        except Exception as error:  # of transformers' operations on tensors that do not fit
            sources = [stored[0][0] for stored in group.tensors.values()]
            raise WeightsError(
                f"{file}: tensors {', '.join(map(repr, sources))}, ... cannot become {name!r}: "
                f"{first_line(error)}"
            ) from error
        for target, tensor in made.items():
            yield target, tensor[0] if isinstance(tensor, list) else tensor, file


def _as_callable(tensor: Tensor) -> Any:
    return lambda: tensor


def _check_alike(group: _Group) -> None:
    """Tensors that are stacked come once, have one shape and dtype, and each pattern has as many."""
    for stored in group.tensors.values():
        usual = Counter((tuple(t.shape), t.dtype) for _, t, _ in stored).most_common(1)[0][0]
        origin: dict[str, Path] = {}
        for name, tensor, file in stored:
            if name in origin:
                raise WeightsError(
                    f"{file}: tensor {name!r} comes twice: {origin[name]} has it, too"
                )
            origin[name] = file
            if (tuple(tensor.shape), tensor.dtype) != usual:
                raise WeightsError(
                    f"{file}: tensor {name!r} has shape {list(tensor.shape)} and dtype "
                    f"{str(tensor.dtype).removeprefix('torch.')}, those beside it {list(usual[0])} and "
                    f"{str(usual[1]).removeprefix('torch.')}"
                )
    most = max(group.tensors.values(), key=len)
    for pattern in group.converter.source_patterns:
        stored = group.tensors.get(pattern, [])
        if len(stored) < len(most):
            raise _missing(pattern, stored, most)


def _missing(pattern: str, stored: list[Stored], most: list[Stored]) -> WeightsError:
    """Error that names the numbered tensor that is not there: the first that another pattern has."""
    have = {tuple(_NUMBER.findall(name)) for name, _, _ in stored}
    sibling, _, file = next(entry for entry in most if tuple(_NUMBER.findall(entry[0])) not in have)
    named = pattern
    if stored:
        numbers = iter(_NUMBER.findall(sibling))
        named = _NUMBER.sub(lambda _: next(numbers), stored[0][0])
    return WeightsError(
        f"{file}: tensor {named!r} is missing from the checkpoint, {sibling!r} is there"
    )


def _natural(stored: Stored) -> list[tuple[int, str]]:
    """Experts by number, 2 before 10."""
    parts = stored[0].split(".")
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
