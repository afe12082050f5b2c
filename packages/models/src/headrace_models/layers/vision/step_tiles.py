"""What the vision models of StepFun have in common: crops of an image and the whole through one tower, whose
states two convolutions make fewer.

Letters: I pictures of one size, D size of the tower's states, V vectors of a picture.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_PROJECTOR = "vit_large_projector"


class StepImages(MediaDecoder):
    """Vectors of an image's crops stand in front of those of the whole."""

    modalities: ClassVar[Sequence[str]] = ("image",)
    projector_rule: ClassVar[WeightRule] = WeightRule(_PROJECTOR, "projector")
    defaults: ClassVar[Mapping[str, Any]]
    """Settings of the tower that configs may leave out."""
    default_bias: ClassVar[bool]
    """Whether the projector has a bias, if the config does not say."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings({**self.defaults, **part_of(whole, "vision_config")})
        size = self.make_tower(context, settings, Settings(whole))
        bias = Settings(whole).flag("projector_bias", self.default_bias)
        out = [Part(self.hidden_size())]
        self.projector = Linear(context, _PROJECTOR, size, out, bias=bias)

    @abstractmethod
    def make_tower(self, context: BuildContext, settings: Settings, whole: Settings) -> int:
        """Make what :meth:`states` needs; returns the size of a state.

        Args:
            settings: of the tower.
        """

    @abstractmethod
    def states(self, pictures: Tensor) -> Tensor:
        """pictures [I, 3, side, side] -> [I, V, size]."""

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, side, side] each; ``tiles`` [crops, 3, side, side], if there are any.
        """
        wholes = self._vectors(torch.stack([own["pixel_values"] for own in inputs]))
        counts = [len(own["tiles"]) if "tiles" in own else 0 for own in inputs]
        found = [[whole] for whole in wholes]
        if any(counts):
            tiles = self._vectors(torch.cat([own["tiles"] for own in inputs if "tiles" in own]))
            for image, own in zip(found, torch.split(tiles, counts), strict=True):
                image.insert(0, own.flatten(0, 1))
        return [torch.cat(image) for image in found]

    def _vectors(self, pictures: Tensor) -> Tensor:
        states = self.states(pictures)
        return self.projector(states.flatten(0, 1)).view(*states.shape[:2], -1)


class Downsampler(Layer):
    """Two convolutions over the plane of a picture's states, nothing between them.

    Args:
        names: of both, as the checkpoint spells them.
        sizes: of the states, between, and behind.
        first: width, step and margin of the first; the second's are 3, 2 and 1.
    """

    def __init__(
        self,
        names: tuple[str, str],
        sizes: tuple[int, int, int],
        first: tuple[int, int, int] = (3, 2, 1),
    ) -> None:
        self.first = Convolution(names[0], sizes[:2], *first)
        self.second = Convolution(names[1], sizes[1:], 3, 2, 1)

    def __call__(self, states: Tensor, side: int) -> Tensor:
        """states [I, side * side, D], row by row -> [I, V, sizes[2]]."""
        planes = states.transpose(1, 2).view(len(states), -1, side, side)
        # One by one: what a picture becomes does not depend on those beside it.
        made = [self.second(self.first(plane[None])) for plane in planes]
        return torch.cat(made).flatten(2).transpose(1, 2)


class Convolution(Layer):
    """A convolution with a bias.

    Args:
        sizes: channels before and behind.
    """

    def __init__(
        self, name: str, sizes: tuple[int, ...], width: int, step: int, margin: int
    ) -> None:
        before, after = sizes
        self.step, self.margin = step, margin
        self.kernel = Vector(f"{name}.weight", after, before, width, width)
        self.bias = Vector(f"{name}.bias", after)

    def __call__(self, x: Tensor) -> Tensor:
        """[I, before, rows, columns] -> [I, after, ...]."""
        return functional.conv2d(x, self.kernel.vector, self.bias.vector, self.step, self.margin)


def downsampler_rules(sources: tuple[str, str], target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Downsampler`."""
    places = zip(sources, ("first", "second"), strict=True)
    return tuple(
        WeightRule(f"{source}.{kind}", f"{target}.{place}.{own}.vector")
        for source, place in places
        for kind, own in (("weight", "kernel"), ("bias", "bias"))
    )


def side_of(pictures: Tensor, patch: int) -> int:
    """Patches of a side of square pictures.

    Raises: UnsupportedModel: they are not square.
    """
    height, width = pictures.shape[-2:]
    if height != width:
        raise UnsupportedModel(f"pictures of {height} x {width} pixels: must be squares")
    return height // patch
