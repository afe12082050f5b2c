"""``q4_0``, ``q4_k``, ``q5_k``, ``q6_k``, ``q8_0``: any checkpoint of floats, made blocks while it is loaded.

The blocks are those of :mod:`headrace_quant.encoders.blocks`; activations stay as they are. ``lm_head``, and
layers whose inputs do not end with a block, are as with ``int8_weight_only``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec
from headrace_core.ops import OpTable, PackedLinear
from headrace_quant.encoders.blocks import (
    BlockEncoder,
    Q4KEncoder,
    Q5KEncoder,
    Q6KEncoder,
    Q40Encoder,
    Q80Encoder,
)
from headrace_quant.gguf.blocks import KINDS
from headrace_quant.gguf.packing import weight_of_codes
from headrace_quant.int_linear_methods import IntegerMethod, RoundedWeight
from headrace_quant.online import HEAD, INT8, Online

if TYPE_CHECKING:
    from torch import Tensor


class RoundedBlocks(IntegerMethod):
    """``weight`` of any floating dtype, made blocks when it has arrived.

    Raises (from ``finish``):
        WeightsError: the weight holds infinities or NaN.
    """

    takes_views = True

    def __init__(self, ops: OpTable, encoder: BlockEncoder) -> None:
        super().__init__(ops, activations="float")
        self.encoder = encoder

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec((spec.out_features, spec.in_features), None, in_dim=1)}

    def kept_bytes(self, spec: LinearSpec) -> int:
        """Bytes of the blocks."""
        kind = KINDS[self.encoder.kind]
        return spec.out_features * (spec.in_features // kind.elements) * kind.num_bytes

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> PackedLinear:
        blocks = spec.in_features // self.encoder.elements
        pieces = self.encoder.pieces(tensors["weight"])
        try:
            weight = weight_of_codes(self.encoder.kind, spec.out_features, blocks, pieces)
        except (WeightsError, ValueError) as error:
            raise WeightsError(f"layer {spec.name!r}: {error}") from None
        return self.pack(spec, weight)


class OnlineBlocks(Online):
    """Makes blocks of any checkpoint while it is loaded."""

    encoder: ClassVar[type[BlockEncoder]]

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        fits = spec.in_features % self.encoder.elements == 0
        if not fits or spec.name.rpartition(".")[2] == HEAD:
            return RoundedWeight(self.ops, INT8, activations="float")
        return RoundedBlocks(self.ops, self.encoder(self.ops))


class Q40(OnlineBlocks):
    name: ClassVar[str] = "q4_0"
    encoder = Q40Encoder


class Q4K(OnlineBlocks):
    name: ClassVar[str] = "q4_k"
    encoder = Q4KEncoder


class Q5K(OnlineBlocks):
    name: ClassVar[str] = "q5_k"
    encoder = Q5KEncoder


class Q6K(OnlineBlocks):
    name: ClassVar[str] = "q6_k"
    encoder = Q6KEncoder


class Q80(OnlineBlocks):
    name: ClassVar[str] = "q8_0"
    encoder = Q80Encoder
