"""A plain reading of MobileNetV5, as the library timm has it: Gemma 3n's tower for images, which transformers
takes from there."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def gemma3n_sees(table: Any, size: int, side: int) -> Iterator[None]:
    """Within it, Gemma 3n of transformers is made with this tower."""
    module = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
    theirs = module.AutoModel

    def from_config(config: Any) -> Any:
        if type(config).__name__ == "Gemma3nVisionConfig":
            return PlainMobileNetV5(table, size, side)
        return theirs.from_config(config)

    module.AutoModel = SimpleNamespace(from_config=from_config)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.AutoModel = theirs  # type: ignore[attr-defined]


def tame(tower: nn.Module) -> None:
    """Scale random kernels so that scores are of the size of 1, and rounding does not grow on the way."""
    with torch.no_grad():
        for kernel in tower.parameters():
            if kernel.dim() == 4:
                kernel.mul_(math.sqrt(kernel.shape[3] / kernel[0].numel()))


class PlainMobileNetV5(nn.Module):
    """See the module.

    Args:
        table: channels of the stem, and the blocks of each stage, as headrace-models has them.
        size: channels of a state.
        side: states of a side.
    """

    def __init__(self, table: Any, size: int, side: int) -> None:
        super().__init__()
        self.table, self.side = table, side
        self.timm_model = nn.Module()
        self._convolution("conv_stem", 3, table.stem, 3)
        self._put("conv_stem.conv.bias", table.stem)
        before, sizes = table.stem, []
        for stage, blocks in enumerate(table.stages):
            for index, block in enumerate(blocks):
                before = self._block(f"blocks.{stage}.{index}", before, block)
            sizes.append(before)
        joined = sizes[-2] + sizes[-1]
        self._convolution("msfa.ffn.pw_exp", joined, 2 * joined, 1)
        self._convolution("msfa.ffn.pw_proj", 2 * joined, size, 1)
        self._put("msfa.norm.weight", size)

    def _put(self, name: str, *shape: int) -> None:
        *path, last = name.split(".")
        place = self.timm_model
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, nn.Parameter(torch.ones(shape)))

    def _convolution(self, name: str, before: int, after: int, width: int) -> None:
        self._put(f"{name}.conv.weight", after, before, width, width)
        self._put(f"{name}.bn.weight", after)

    def _block(self, name: str, size: int, block: Any) -> int:
        if hasattr(block, "num_heads"):
            wide = block.num_heads * block.head_dim
            self._put(f"{name}.norm.weight", size)
            self._put(f"{name}.attn.query.proj.weight", wide, size, 1, 1)
            for part in ("key", "value"):
                self._put(f"{name}.attn.{part}.proj.weight", block.head_dim, size, 1, 1)
                if block.stride > 1:
                    self._put(f"{name}.attn.{part}.down_conv.weight", size, 1, 3, 3)
                    self._put(f"{name}.attn.{part}.norm.weight", size)
            self._put(f"{name}.attn.output.proj.weight", size, wide, 1, 1)
            self._put(f"{name}.layer_scale.gamma", size)
            return size
        after: int = block.size
        between = size * block.expansion
        if not hasattr(block, "middle"):
            self._put(f"{name}.conv_exp.weight", between, size, 3, 3)
            self._put(f"{name}.bn1.weight", between)
            self._put(f"{name}.conv_pwl.weight", block.size, between, 1, 1)
            self._put(f"{name}.bn2.weight", block.size)
            return after
        if block.start:
            self._convolution(f"{name}.dw_start", 1, size, block.start)
        self._convolution(f"{name}.pw_exp", size, between, 1)
        if block.middle:
            self._convolution(f"{name}.dw_mid", 1, between, block.middle)
        self._convolution(f"{name}.pw_proj", between, block.size, 1)
        self._put(f"{name}.layer_scale.gamma", block.size)
        return after

    def forward(self, pixel_values: Tensor, **_: Any) -> Any:
        w = dict(self.timm_model.named_parameters())

        def norm(x: Tensor, name: str) -> Tensor:
            x = x / (x.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
            return x * w[name].view(1, -1, 1, 1)

        def convolved(x: Tensor, name: str, stride: int = 1) -> Tensor:
            kernel = w[f"{name}.weight"]
            pads = []
            for size in (x.shape[3], x.shape[2]):
                out = math.ceil(size / stride)
                more = max(0, (out - 1) * stride + kernel.shape[2] - size)
                pads += [more // 2, more - more // 2]
            groups = x.shape[1] // kernel.shape[1]
            bias = w.get(f"{name}.bias")
            return F.conv2d(F.pad(x, pads), kernel, bias, stride, groups=groups)

        def block(x: Tensor, name: str, own: Any) -> Tensor:
            if hasattr(own, "num_heads"):
                y = norm(x, f"{name}.norm.weight")
                q = convolved(y, f"{name}.attn.query.proj").flatten(2)
                q = q.view(len(x), own.num_heads, own.head_dim, -1)
                seen = []
                for part in ("key", "value"):
                    z = y
                    if own.stride > 1:
                        z = convolved(z, f"{name}.attn.{part}.down_conv", own.stride)
                        z = norm(z, f"{name}.attn.{part}.norm.weight")
                    seen.append(convolved(z, f"{name}.attn.{part}.proj").flatten(2))
                scores = torch.einsum("nhdq,ndk->nhqk", q, seen[0]) / own.head_dim**0.5
                out = torch.einsum("nhqk,ndk->nhdq", scores.softmax(-1), seen[1])
                out = out.reshape(len(x), -1, *x.shape[2:])
                made = convolved(out, f"{name}.attn.output.proj")
                return x + made * w[f"{name}.layer_scale.gamma"].view(1, -1, 1, 1)
            y = x
            if not hasattr(own, "middle"):
                y = norm(convolved(y, f"{name}.conv_exp", own.stride), f"{name}.bn1.weight")
                y = convolved(F.gelu(y, approximate="tanh"), f"{name}.conv_pwl")
                y = norm(y, f"{name}.bn2.weight")
            else:
                if own.start:
                    stride = 1 if own.middle else own.stride
                    y = both(y, f"{name}.dw_start", stride, act=False)
                y = both(y, f"{name}.pw_exp")
                if own.middle:
                    y = both(y, f"{name}.dw_mid", own.stride)
                y = both(y, f"{name}.pw_proj", act=False)
                y = y * w[f"{name}.layer_scale.gamma"].view(1, -1, 1, 1)
            return x + y if y.shape == x.shape and own.stride == 1 else y

        def both(x: Tensor, name: str, stride: int = 1, act: bool = True) -> Tensor:
            x = norm(convolved(x, f"{name}.conv", stride), f"{name}.bn.weight")
            return F.gelu(x, approximate="tanh") if act else x

        x = both(pixel_values, "conv_stem", 2)
        found = []
        for stage, blocks in enumerate(self.table.stages):
            for index, own in enumerate(blocks):
                x = block(x, f"blocks.{stage}.{index}", own)
            found.append(x)
        x = torch.cat((found[-2], found[-1].repeat_interleave(2, 2).repeat_interleave(2, 3)), 1)
        x = both(both(x, "msfa.ffn.pw_exp"), "msfa.ffn.pw_proj", act=False)
        x = norm(F.avg_pool2d(x, x.shape[2] // self.side), "msfa.norm.weight")
        return SimpleNamespace(last_hidden_state=x)
