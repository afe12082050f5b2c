"""MobileNetV5, Gemma 3n's tower for images: convolutions, then attention with one key for all heads; the last
two stages are joined.

Qin et al. 2024, arXiv:2404.10518, for the blocks; names are those of the library timm. Letters: N images, C
channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_MULTIPLE = 8
"""Widened channels are rounded to one."""


class Edge(NamedTuple):
    """A convolution that widens, and one of single places that narrows."""

    size: int
    stride: int = 1
    expansion: int = 4
    width: int = 3


class Inverted(NamedTuple):
    """Widened and narrowed place by place, perhaps with convolutions of each channel before and between."""

    size: int
    start: int = 0
    """Width of the convolution before; 0: there is none."""
    expansion: int = 4
    middle: int = 0
    stride: int = 1


class Query(NamedTuple):
    """Attention; keys and values are of every ``stride``-th place."""

    num_heads: int
    head_dim: int
    stride: int = 1


Stage = Sequence[Edge | Inverted | Query]


class Table(NamedTuple):
    """A tower's sizes."""

    stem: int
    stages: Sequence[Stage]


def _attended(size: int, count: int, query: Query) -> list[Edge | Inverted | Query]:
    return [query, Inverted(size, expansion=2)] * count


TABLES: Mapping[str, Table] = {
    "mobilenetv5_300m_enc": Table(
        64,
        (
            (Edge(128, 2), Edge(128), Edge(128)),
            (Inverted(256, 3, 6, 5, 2), *(Inverted(256, start) for start in (5, 3, 5, 3))),
            (
                Inverted(640, 5, 6, 5, 2),
                *[Inverted(640, 5)] * 7,
                Inverted(640, expansion=1),
                *_attended(640, 14, Query(12, 64, 2)),
            ),
            (Inverted(1280, 5, 6, 5, 2), *_attended(1280, 19, Query(16, 96))),
        ),
    )
}
"""By ``vision_config.architecture``."""


def tower_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`MobileNetV5`: its names in the checkpoint and in the model."""
    block, own = f"{source}.blocks.{{}}.{{}}", f"{target}.stages.{{}}.blocks.{{}}"
    pooled = ("key", "value")
    return (
        *_convolution_rules(f"{source}.conv_stem", f"{target}.stem"),
        WeightRule(f"{source}.conv_stem.conv.bias", f"{target}.stem.bias.vector"),
        WeightRule(f"{block}.conv_exp.weight", f"{own}.wide.kernel.vector"),
        WeightRule(f"{block}.bn1.weight", f"{own}.wide.norm.vector"),
        WeightRule(f"{block}.conv_pwl.weight", f"{own}.narrow.kernel.vector"),
        WeightRule(f"{block}.bn2.weight", f"{own}.narrow.norm.vector"),
        *_convolution_rules(f"{block}.dw_start", f"{own}.start"),
        *_convolution_rules(f"{block}.pw_exp", f"{own}.wide"),
        *_convolution_rules(f"{block}.dw_mid", f"{own}.middle"),
        *_convolution_rules(f"{block}.pw_proj", f"{own}.narrow"),
        WeightRule(f"{block}.layer_scale.gamma", f"{own}.scale.vector"),
        WeightRule(f"{block}.norm.weight", f"{own}.norm.vector"),
        WeightRule(f"{block}.attn.query.proj.weight", f"{own}.query.vector"),
        WeightRule(f"{block}.attn.output.proj.weight", f"{own}.out.vector"),
        *(
            rule
            for part in pooled
            for rule in (
                WeightRule(f"{block}.attn.{part}.proj.weight", f"{own}.{part}.vector"),
                WeightRule(
                    f"{block}.attn.{part}.down_conv.weight", f"{own}.{part}_pool.kernel.vector"
                ),
                WeightRule(f"{block}.attn.{part}.norm.weight", f"{own}.{part}_pool.norm.vector"),
            )
        ),
        *_convolution_rules(f"{source}.msfa.ffn.pw_exp", f"{target}.wide"),
        *_convolution_rules(f"{source}.msfa.ffn.pw_proj", f"{target}.narrow"),
        WeightRule(f"{source}.msfa.norm.weight", f"{target}.last_norm.vector"),
    )


def _convolution_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{source}.conv.weight", f"{target}.kernel.vector"),
        WeightRule(f"{source}.bn.weight", f"{target}.norm.vector"),
    )


class MobileNetV5(Layer):
    """An image -> as many states as it is asked for, whatever its size.

    Args:
        name: as the checkpoint spells it.
        size: channels of a state.
        side: states of a side.
    """

    def __init__(
        self, context: BuildContext, table: Table, name: str, size: int, side: int
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.side = side
        self.stem = Convolution(f"{name}.conv_stem.conv", (3, table.stem), 3, stride=2, bias=True)
        self.stages, before, joined = [], table.stem, 0
        for index, stage in enumerate(table.stages):
            self.stages.append(ConvolutionStage(f"{name}.blocks.{index}", before, stage))
            before = self.stages[-1].size
            joined += before if index >= len(table.stages) - 2 else 0
        between = rounded(2 * joined)
        self.wide = Convolution(f"{name}.msfa.ffn.pw_exp.conv", (joined, between), 1)
        self.narrow = Convolution(
            f"{name}.msfa.ffn.pw_proj.conv", (between, size), 1, activated=False
        )
        self.last_norm = Vector(f"{name}.msfa.norm.weight", size)

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [3, H, W] -> [side * side, size], row by row."""
        x = self.stem(pixels.to(self.dtype)[None])
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        fine, coarse = found[-2:]
        coarse = functional.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        x = self._pooled(self.narrow(self.wide(torch.cat((fine, coarse), dim=1))))
        return normed(x, self.last_norm.vector)[0].flatten(1).t()

    def _pooled(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        if height % self.side or width % self.side:
            return functional.interpolate(x, size=(self.side, self.side), mode="bilinear")
        strides = height // self.side, width // self.side
        return functional.avg_pool2d(x, strides, strides)


class ConvolutionStage(Layer):
    """Blocks, the first of which has another size of channels.

    Args:
        before: channels of what comes.
    """

    def __init__(self, name: str, before: int, stage: Stage) -> None:
        self.size, self.blocks = before, list[Layer]()
        for index, block in enumerate(stage):
            own = f"{name}.{index}"
            if isinstance(block, Query):
                self.blocks.append(QueryBlock(own, self.size, block))
                continue
            made = EdgeBlock if isinstance(block, Edge) else InvertedBlock
            self.blocks.append(made(own, self.size, block))  # type: ignore[arg-type]
            self.size = block.size

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, before, H, W] -> [N, size, ...]."""
        for block in self.blocks:
            x = block(x)  # type: ignore[operator]
        return x


class Convolution(Layer):
    """A convolution whose result is as large as what comes, or that divided by the stride, rounded up; a norm
    over channels; perhaps GELU.

    Args:
        name: of its kernel, as the checkpoint spells it.
        sizes: channels before and after.
        single: each channel by itself.
    """

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int],
        width: int,
        *,
        stride: int = 1,
        single: bool = False,
        bias: bool = False,
        activated: bool = True,
    ) -> None:
        before, after = sizes
        self.width, self.stride, self.activated = width, stride, activated
        self.groups = before if single else 1
        self.kernel = Vector(f"{name}.weight", after, before // self.groups, width, width)
        self.bias = Vector(f"{name}.bias", after) if bias else None
        self.norm = Vector(f"{name}.norm", after)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, before, H, W] -> [N, after, ...]."""
        bias = None if self.bias is None else self.bias.vector
        padded = self._padded(x)
        x = functional.conv2d(padded, self.kernel.vector, bias, self.stride, groups=self.groups)
        x = normed(x, self.norm.vector)
        return functional.gelu(x, approximate="tanh") if self.activated else x

    def _padded(self, x: Tensor) -> Tensor:
        """With zeros around it, one more behind than before where they are odd in number."""
        sides = []
        for size in reversed(x.shape[-2:]):
            whole = (-(-size // self.stride) - 1) * self.stride + self.width - size
            more = max(0, whole)
            sides += [more // 2, more - more // 2]
        return functional.pad(x, sides)


class EdgeBlock(Layer):
    """See :class:`Edge`."""

    def __init__(self, name: str, before: int, block: Edge) -> None:
        between = rounded(before * block.expansion)
        self.keeps = before == block.size and block.stride == 1
        self.wide = Convolution(
            f"{name}.conv_exp", (before, between), block.width, stride=block.stride
        )
        self.narrow = Convolution(f"{name}.conv_pwl", (between, block.size), 1, activated=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, before, H, W] -> [N, size, ...]."""
        made = self.narrow(self.wide(x))
        return x + made if self.keeps else made


class InvertedBlock(Layer):
    """See :class:`Inverted`."""

    def __init__(self, name: str, before: int, block: Inverted) -> None:
        between = rounded(before * block.expansion)
        self.keeps = before == block.size and block.stride == 1
        self.start: Convolution | None = None
        if block.start:
            stride = 1 if block.middle else block.stride
            self.start = Convolution(
                f"{name}.dw_start.conv",
                (before, before),
                block.start,
                stride=stride,
                single=True,
                activated=False,
            )
        self.wide = Convolution(f"{name}.pw_exp.conv", (before, between), 1)
        self.middle: Convolution | None = None
        if block.middle:
            self.middle = Convolution(
                f"{name}.dw_mid.conv",
                (between, between),
                block.middle,
                stride=block.stride,
                single=True,
            )
        self.narrow = Convolution(f"{name}.pw_proj.conv", (between, block.size), 1, activated=False)
        self.scale = Vector(f"{name}.layer_scale.gamma", block.size)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, before, H, W] -> [N, size, ...]."""
        made = self.wide(x if self.start is None else self.start(x))
        made = self.narrow(made if self.middle is None else self.middle(made))
        made = made * self.scale.vector[:, None, None]
        return x + made if self.keeps else made


class QueryBlock(Layer):
    """See :class:`Query`; keys and values have one head, which all queries see.

    Args:
        size: of channels.
    """

    def __init__(self, name: str, size: int, block: Query) -> None:
        self.num_heads, dim = block.num_heads, block.head_dim
        wide = block.num_heads * dim
        self.norm = Vector(f"{name}.norm.weight", size)
        self.query = Vector(f"{name}.attn.query.proj.weight", wide, size, 1, 1)
        self.key = Vector(f"{name}.attn.key.proj.weight", dim, size, 1, 1)
        self.value = Vector(f"{name}.attn.value.proj.weight", dim, size, 1, 1)
        self.key_pool = self.value_pool = None
        if block.stride > 1:
            self.key_pool = self._pool(f"{name}.attn.key", size, block.stride)
            self.value_pool = self._pool(f"{name}.attn.value", size, block.stride)
        self.out = Vector(f"{name}.attn.output.proj.weight", size, wide, 1, 1)
        self.scale = Vector(f"{name}.layer_scale.gamma", size)

    def _pool(self, name: str, size: int, stride: int) -> Convolution:
        return Convolution(
            f"{name}.down_conv", (size, size), 3, stride=stride, single=True, activated=False
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, C, H, W] -> the same shape."""
        y = normed(x, self.norm.vector)
        query = functional.conv2d(y, self.query.vector).flatten(2)
        query = query.view(len(x), self.num_heads, -1, query.shape[-1]).transpose(2, 3)
        key = self._seen(y, self.key_pool, self.key)
        value = self._seen(y, self.value_pool, self.value)
        seen = functional.scaled_dot_product_attention(query, key, value)
        seen = seen.transpose(2, 3).flatten(1, 2).reshape(len(x), -1, *x.shape[-2:])
        made = functional.conv2d(seen, self.out.vector) * self.scale.vector[:, None, None]
        return x + made

    def _seen(self, y: Tensor, pool: Convolution | None, projection: Vector) -> Tensor:
        """[N, heads, places, head size]."""
        pooled = y if pool is None else pool(y)
        found = functional.conv2d(pooled, projection.vector).flatten(2).transpose(1, 2)
        return found[:, None].expand(-1, self.num_heads, -1, -1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, C, H, W], by the root of the mean square of channels."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + _EPS)
    return (wide * weight.float()[:, None, None]).to(x.dtype)


def rounded(size: int) -> int:
    """To the nearest multiple of eight that is not less than nine tenths."""
    found = max(_MULTIPLE, (size + _MULTIPLE // 2) // _MULTIPLE * _MULTIPLE)
    return found if found >= 0.9 * size else found + _MULTIPLE
