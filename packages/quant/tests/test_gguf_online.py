"""Blocks made while loading: nearly the weight, within the blocks' bytes; other layers in int8."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_quant.gguf.blocks import KINDS
from headrace_quant.gguf.online import RoundedBlocks
from headrace_quant.gguf.packing import floats
from headrace_quant.int_linear_methods import RoundedWeight
from headrace_testing.model.quant_methods import QuantConformance


class OnlineBlocksConformance(QuantConformance):
    config = None
    in_features: ClassVar[int] = 512
    error: ClassVar[float]
    """Most relative error of random weights."""

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """A weight that 16-bit floats hold, and the one that its blocks stand for."""
        weight = weight.bfloat16().half().float()
        method = self.method(spec.dtype).for_layer(spec)
        assert isinstance(method, RoundedBlocks)
        blocks = method.encoder.encode(weight)
        assert blocks is not None
        return {"weight": weight}, floats(method.encoder.kind, blocks["weight"], torch.float32)

    def test_error(self) -> None:
        spec = self.spec()
        weight = self.weight(spec)
        _, found = self.make_tensors(spec, weight)
        assert self.error / 8 < float((found - weight).norm() / weight.norm()) < self.error

    def test_kept_bytes(self) -> None:
        spec = self.spec()
        method = self.method().for_layer(spec)
        assert isinstance(method, RoundedBlocks)
        kind = KINDS[method.encoder.kind]
        weights = spec.out_features * spec.in_features
        assert method.kept_bytes(spec) == weights // kind.elements * kind.num_bytes

    @pytest.mark.parametrize(
        "spec",
        [
            LinearSpec("model.lm_head", 512, (8,), "float32"),
            LinearSpec("model.up", 500, (8,), "float32"),
        ],
        ids=["head", "odd"],
    )
    def test_other_layers_are_int8(self, spec: LinearSpec) -> None:
        assert isinstance(self.method().for_layer(spec), RoundedWeight)

    def test_weights_that_are_no_numbers_are_refused(self) -> None:
        spec = self.spec()
        weight = self.weight(spec)
        weight[3, 4] = torch.nan
        with pytest.raises(WeightsError, match="gate_up_proj"):
            self.method().for_layer(spec).finish(spec, {"weight": weight})

    def test_a_quantized_checkpoint_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no stored integers"):
            self.method(config={"quant_method": self.name})


class TestQ40(OnlineBlocksConformance):
    name = "q4_0"
    error = 0.1


class TestQ4K(OnlineBlocksConformance):
    name = "q4_k"
    error = 0.09


class TestQ5K(OnlineBlocksConformance):
    name = "q5_k"
    error = 0.05


class TestQ6K(OnlineBlocksConformance):
    name = "q6_k"
    error = 0.025


class TestQ80(OnlineBlocksConformance):
    name = "q8_0"
    error = 0.007
