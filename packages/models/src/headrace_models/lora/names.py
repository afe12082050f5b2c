"""From the names of modules that an adapter was trained on to places of a built model.

A module's rows go the way of its weight's: through the family's weight rules and what the family makes of
its checkpoints' names, so that fused, cut and reordered weights need no tables of their own here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.model import TranslatesWeights, WeightRule
from headrace_models.loading.mapping import Place as Where
from headrace_models.loading.mapping import WeightMap, stored_shape
from headrace_models.lora.files import Factors
from headrace_models.lora.places import ExpertsPlace, LinearPlace, Place, TablePlace
from headrace_models.lora.targets import Piece, Target, pieces_of

if TYPE_CHECKING:
    from torch import Tensor

_HEAD, _HEAD_MODULE = "head", "lm_head"
"""The head's attribute in a decoder, and its name in transformers' newer classes, whatever files call it."""
_TRUNK = "model."
"""Begins names of an architecture with a head; those of the model without one lack it."""
_MOST_LAYERS = 16
"""Layers that one module may be of, in all families; more is refused before memory is taken for it."""
_WHOLE = WeightRule("", "", split=())


class ModuleNames:
    """Names of a model's modules.

    Args:
        rules: the family's.
        places: by path of the layer.
    """

    def __init__(
        self, model: Any, rules: Sequence[WeightRule], places: Mapping[str, Place]
    ) -> None:
        self.model, self.places = model, places
        self.map = WeightMap(rules, places)
        self._largest = _MOST_LAYERS * max(
            size
            for slots in self.map.slots.values()
            for slot in slots.values()
            for size in stored_shape(slot, range(slot.num_parts), _WHOLE)
        )
        self.by_name = {
            name: (place, *where)
            for place in places.values()
            for name, where in place.modules().items()
        }
        if isinstance(head := places.get(_HEAD), LinearPlace):
            self.by_name.setdefault(_HEAD_MODULE, (head, "weight", 0))

    def pieces(self, module: str, factors: Factors, file: Path) -> list[Piece]:
        """The parts of layers that a module is.

        Returns:
            []: it has no place.

        Raises:
            WeightsError: the factors are not of the module's shape or kind.
        """
        outputs, inputs = len(factors.up), factors.down.shape[1]
        sizes = (inputs, outputs) if factors.is_table else (outputs, inputs)
        if max(sizes) > self._largest:
            raise WeightsError(
                f"{file}: factors of {module!r} are of a weight {list(sizes)} [out, in]: no module of the "
                "model is so large"
            )
        targets = self._targets(module, sizes, file)
        if any(isinstance(target.place, TablePlace) != factors.is_table for target in targets):
            raise WeightsError(
                f"{file}: factors of {module!r}: must be lora_embedding_A and lora_embedding_B if it is a "
                "table of vectors, and lora_A and lora_B if not"
            )
        return [p for target in targets for p in pieces_of(target, module, factors, file)]

    def mixture(self, module: str) -> ExpertsPlace | None:
        """The experts of a name, or else those of the layer that the name counts."""
        found = {
            path: place
            for path, place in self.places.items()
            if isinstance(place, ExpertsPlace) and place.num_experts > 1
        }
        for place in found.values():
            if place.name in self._spellings(module):
                return place
        numbers = re.findall(r"\.(\d+)\.", module)[:1]
        alike = [place for path, place in found.items() if path.split(".")[1:2] == numbers]
        return alike[0] if len(alike) == 1 else None

    def has_interleaved(self, mixture: ExpertsPlace) -> bool:
        """True if the parameter with all experts' gates and ups has them row by row."""
        where = next(Where(path, key) for path, place in self.places.items() if place is mixture
                     for key in self.map.slots[path])  # fmt: skip
        return any(rule.stacked and rule.interleaved for _, rule in self.map.sources(where, 0))

    def is_unread(self, module: str) -> bool:
        """True if a module is one of a tower whose weights are not read, as nothing that the tower gives
        depends on them: behind the layer whose states are read, say."""
        unread: Mapping[str, str] = getattr(self.model, "unread_weights", dict)()
        own = (name for spelled in self._spellings(module) for name in self._renamed(spelled))
        return any(re.fullmatch(pattern, f"{name}.weight") for name in own for pattern in unread)

    def _renamed(self, module: str) -> list[str]:
        """The family's names of a module's weight, without their end."""
        return [name for name, _ in self._own_names(module, (1, 1), Path())]

    def known(self) -> list[str]:
        """Names of modules that have places, in the checkpoint's usual spelling."""
        found = dict.fromkeys(self.by_name)
        for path, slots in self.map.slots.items():
            for key, slot in slots.items():
                for part in range(slot.num_parts):
                    sources = self.map.sources(Where(path, key), part)
                    found |= dict.fromkeys(name.removesuffix(".weight") for name, _ in sources[:1])
        return list(found)

    def _targets(self, module: str, sizes: tuple[int, int], file: Path) -> list[Target]:
        for spelled in self._spellings(module):
            found = [self._target(*own) for own in self._own_names(spelled, sizes, file)]
            if found and all(found):
                return [target for target in found if target is not None]
        return []

    def _spellings(self, module: str) -> Iterator[str]:
        """The name as files may have it, the likeliest first."""
        renamed = module
        for pattern, replaced in getattr(self.model, "module_names", ()):
            renamed = re.sub(pattern, replaced, renamed)
        yield from dict.fromkeys((module, renamed, _TRUNK + module, module.removeprefix(_TRUNK)))

    def _target(self, name: str, rows: Tensor | None) -> Target | None:
        match = self.map.find(f"{name}.weight")
        if match is not None and not match.rule.stacked:
            place, key = self.places[match.place.leaf], match.place.key
            return Target(place, key, replace(match.rule, transposed=False), rows)
        if name not in self.by_name:
            return None
        named, key, part = self.by_name[name]
        return Target(named, key, WeightRule(name, "", part=part), rows)

    def _own_names(
        self, module: str, sizes: tuple[int, int], file: Path
    ) -> Iterator[tuple[str, Tensor | None]]:
        """What the family makes of a module's weight: names below which its rows end, and which they are.

        A weight that says which row each of its numbers is of is sent through, past what is added to weights
        (``renamed``).
        """
        model = cast(object, self.model)
        if not isinstance(model, TranslatesWeights):
            yield module, None
            return
        translate = getattr(model, "renamed", model.translate)
        probe = torch.arange(float(sizes[0]))[:, None].expand(*sizes)
        try:
            made = list(translate(iter([(f"{module}.weight", probe, file)])))
        except (WeightsError, UnsupportedModel, LookupError, ValueError, RuntimeError):
            return  # a tensor that it needs others for, or takes for something else
        for name, tensor, _ in made:
            if name.endswith(".weight") and (tensor is probe or _has_rows(tensor, sizes[1])):
                rows = None if tensor is probe else tensor[:, 0].long()
                yield name.removesuffix(".weight"), rows


def _has_rows(made: Tensor, inputs: int) -> bool:
    """True if each row of what became of a probe is one of the probe's."""
    return made.dim() == 2 and made.shape[1] == inputs and bool((made == made[:, :1]).all())
