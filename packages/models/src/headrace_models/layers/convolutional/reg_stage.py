"""Stages of RegNet blocks between states of a tower and vectors, as the Honeybee projectors have them.

Radosavovic et al. 2020, arXiv:2003.13678, for the blocks; Cha et al. 2023, arXiv:2312.06742, for where they
stand; names are those of the library timm. Letters: C channels, H height, W width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

_EPS = 1e-5
_SQUEEZED = 4
"""Channels of what comes for each one of what weighs them."""
_CONVOLUTIONS = ("conv1", "conv2", "conv3", "downsample")


def stage_rules(source: str, target: str, depth: int) -> tuple[WeightRule, ...]:
    """Rules of a :class:`RegStage`: its names in the checkpoint and in the model.

    Args:
        depth: blocks at most.
    """
    return tuple(
        rule
        for index in range(depth)
        for rule in _block_rules(f"{source}.b{index + 1}", f"{target}.blocks.{index}")
    )


def _block_rules(source: str, target: str) -> list[WeightRule]:
    pairs = [
        (f"{name}.{theirs}", f"{name}.{own}")
        for name in _CONVOLUTIONS
        for theirs, own in (
            ("conv.weight", "kernel.vector"),
            ("bn.weight", "weight.vector"),
            ("bn.bias", "bias.vector"),
        )
    ]
    pairs += [
        (f"se.{name}.{theirs}", f"{name}.{own}")
        for name in ("fc1", "fc2")
        for theirs, own in (("weight", "kernel.vector"), ("bias", "bias.vector"))
    ]
    return [WeightRule(f"{source}.{theirs}", f"{target}.{own}") for theirs, own in pairs]


class NormedConvolution(Layer):
    """A convolution without bias, and a norm of each place's channels.

    Args:
        kernel: of its weight.
    """

    def __init__(self, name: str, kernel: tuple[int, int, int, int]) -> None:
        self.kernel = Vector(f"{name}.conv.weight", *kernel)
        self.weight = Vector(f"{name}.bn.weight", kernel[0])
        self.bias = Vector(f"{name}.bn.bias", kernel[0])
        self.groups = kernel[0] if kernel[2] > 1 else 1
        self.padding = kernel[2] // 2

    def __call__(self, x: Tensor) -> Tensor:
        """x [1, C, H, W] -> [1, kernel[0], H, W]."""
        made = functional.conv2d(x, self.kernel.vector, padding=self.padding, groups=self.groups)
        last = made.permute(0, 2, 3, 1)
        normed = functional.layer_norm(
            last, last.shape[-1:], self.weight.vector, self.bias.vector, _EPS
        )
        return normed.permute(0, 3, 1, 2)


class Biased(Layer):
    """A product with a bias, of all channels of a place."""

    def __init__(self, name: str, before: int, after: int) -> None:
        self.kernel = Vector(f"{name}.weight", after, before, 1, 1)
        self.bias = Vector(f"{name}.bias", after)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.kernel.vector, self.bias.vector)


class RegBlock(Layer):
    """Place by place, then each channel's neighbours, weighed by the channels' means, then place by place.

    Args:
        before, after: channels.
    """

    def __init__(self, name: str, before: int, after: int) -> None:
        self.conv1 = NormedConvolution(f"{name}.conv1", (after, before, 1, 1))
        self.conv2 = NormedConvolution(f"{name}.conv2", (after, 1, 3, 3))
        squeezed = round(before / _SQUEEZED)
        self.fc1 = Biased(f"{name}.se.fc1", after, squeezed)
        self.fc2 = Biased(f"{name}.se.fc2", squeezed, after)
        self.conv3 = NormedConvolution(f"{name}.conv3", (after, after, 1, 1))
        self.downsample = (
            NormedConvolution(f"{name}.downsample", (after, before, 1, 1))
            if before != after
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [1, before, H, W] -> [1, after, H, W]."""
        made = functional.silu(self.conv2(functional.silu(self.conv1(x))))
        means = made.mean((2, 3), keepdim=True)
        made = made * self.fc2(functional.silu(self.fc1(means))).sigmoid()
        beside = x if self.downsample is None else self.downsample(x)
        return functional.silu(self.conv3(made) + beside)


class RegStage(Layer):
    """Blocks, the first of which has another number of channels.

    Args:
        depth: of them.
    """

    def __init__(self, name: str, depth: int, before: int, after: int) -> None:
        self.blocks = [
            RegBlock(f"{name}.b{index + 1}", after if index else before, after)
            for index in range(depth)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """x [1, before, H, W] -> [1, after, H, W]."""
        for block in self.blocks:
            x = block(x)
        return x
