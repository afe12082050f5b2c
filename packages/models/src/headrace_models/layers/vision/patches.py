"""Patches of images as vectors: a convolution whose steps are as wide as its kernel, as a product."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace_models.layers.base import Slot, WeightLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


class PatchEmbedding(WeightLayer):
    """Each patch, flattened as the checkpoint's kernel is, becomes a vector.

    Args:
        kernel: channels, then the sizes of a patch ((3, 14, 14); (3, 2, 14, 14) with time).
    """

    def __init__(
        self, context: BuildContext, name: str, kernel: tuple[int, ...], size: int, *, bias: bool
    ) -> None:
        self.name, self.ops = name, context.ops
        self.kernel, self.size, self.has_bias = kernel, size, bias
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        slots = {"weight": Slot((self.size, *self.kernel))}
        return {**slots, "bias": Slot((self.size,))} if self.has_bias else slots

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        flat = tensors["weight"].reshape(self.size, math.prod(self.kernel))
        self.packed = self.ops.linear.pack(flat.contiguous())
        self.bias = tensors.get("bias")

    def __call__(self, patches: Tensor) -> Tensor:
        """patches [N, prod(kernel)] -> [N, size]."""
        assert self.packed is not None, self.name
        return self.ops.linear(patches, self.packed, self.bias)


def in_patches(images: Tensor, patch: int) -> Tensor:
    """images [I, C, height, width] -> [I, rows * columns, C * patch * patch]; what no patch covers is left
    out."""
    count, channels, height, width = images.shape
    rows, columns = height // patch, width // patch
    cut = images[:, :, : rows * patch, : columns * patch]
    blocks = cut.reshape(count, channels, rows, patch, columns, patch)
    return blocks.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, -1)
