"""Several towers in one model, each for modalities of its own: :class:`TowersByModality`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from headrace_core.model import WeightRule
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class MediaEncoder(Protocol):
    """A :class:`~headrace_models.layers.base.Layer` that turns items into vectors."""

    def embed(self, modality: str, inputs: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """Vectors of a batch of items, which do not see each other; see
        :class:`headrace_core.model.SupportsMultiModal`."""
        ...


class Tower(NamedTuple):
    """A row of a family's table."""

    part: str
    """Key of its part of the config; a checkpoint without it has no such tower."""
    modalities: tuple[str, ...]
    """Modalities that it takes."""
    name: str
    """Name of its module in the checkpoint; the model has the encoder under it."""
    rules: Sequence[WeightRule]
    """Rules of its tensors; targets begin with :attr:`name`."""
    make: Callable[[BuildContext, Mapping[str, Any], str, int], MediaEncoder]
    """(context, part of the config, name, size of a vector) -> encoder."""


class TowersByModality(MediaDecoder):
    """A family says its :attr:`towers`, which must be those of its :attr:`media_rules`."""

    towers: ClassVar[Sequence[Tower]]

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        """See :meth:`MediaDecoder.make_towers`: a tower whose part of the config is left out, as when its
        modalities are limited to 0, is neither made nor loaded."""
        self.encoders: dict[str, MediaEncoder] = {}
        for tower in self.towers:
            if tower.part not in whole:
                continue
            stated = part_of(whole, tower.part)
            encoder = tower.make(context, stated, tower.name, self.hidden_size())
            setattr(self, tower.name, encoder)
            self.encoders |= dict.fromkeys(tower.modalities, encoder)

    @property
    def modalities(self) -> Sequence[str]:  # type: ignore[override]
        """Modalities of the towers that were made."""
        return tuple(self.encoders)

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of towers that were not made."""
        return {
            rf"{re.escape(tower.name)}\..*": f"{' and '.join(tower.modalities)} are limited to 0"
            for tower in self.towers
            if not hasattr(self, tower.name)
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`; inputs are those of the modality's
        encoder."""
        return self.encoders[modality].embed(modality, inputs)


def rules_of(towers: Sequence[Tower]) -> tuple[WeightRule, ...]:
    """Value of :attr:`MediaDecoder.media_rules` for a table of towers."""
    return tuple(rule for tower in towers for rule in tower.rules)
