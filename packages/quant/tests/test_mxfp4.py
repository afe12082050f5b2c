"""4-bit floats in blocks, against values worked out by hand."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.mxfp4 import STORED, Mxfp4
from headrace_quant.none import PlainWeight
from headrace_quant.small_floats import SmallFloatWeight
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
NAME = "model.layers.0.mlp.experts.3.down_proj"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def meant(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [N, B, 16], scales [N, B] -> [N, 32 B] float64; code by code."""
    rows = []
    for octets, exponents in zip(blocks.tolist(), scales.tolist(), strict=True):
        row: list[float] = []
        for block, exponent in zip(octets, exponents, strict=True):
            for octet in block:
                for code in (octet % 16, octet // 16):
                    sign = -1.0 if code >= 8 else 1.0
                    row.append(sign * VALUES[code % 8] * 2.0 ** (exponent - 127))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


class TestStored(QuantConformance):
    name = "mxfp4"
    config: ClassVar = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip
    ignores = "lm_head"
    in_features = 96
    refused: ClassVar = {"modules_to_not_convert": "x"}

    def spec(self, dtype: str = "float32", name: str = f"{NAME}s.gate_up_proj") -> LinearSpec:
        return super().spec(dtype, "model.layers.0.mlp.experts.1.gate_up_proj")

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, groups = spec.out_features, spec.in_features // 32
        generator = torch.Generator().manual_seed(int(weight[2].abs().sum() * 100))
        blocks = torch.randint(0, 256, (rows, groups, 16), generator=generator).byte()
        scales = torch.randint(120, 124, (rows, groups), generator=generator).byte()
        blocks[1] = 0
        scales[0] += 6
        tensors = {"weight_blocks": blocks, "weight_scales": scales}
        return tensors, meant(blocks, scales).float()

    def test_kept_bytes_are_the_files(self) -> None:
        assert self.method().for_layer(self.spec()).kept_bytes(self.spec()) is None

    def test_swapped_halves_show(self) -> None:
        spec = self.spec()
        tensors, real = self.make_tensors(spec, self.weight(spec))
        blocks = tensors["weight_blocks"]
        tensors["weight_blocks"] = (blocks >> 4) | (blocks << 4)
        state = self.method().for_layer(spec).finish(spec, tensors)
        assert float((dequantized(state.data[0]) - real).abs().max()) > 1


class TestOnline(QuantConformance):
    name = "mxfp4"
    config = None
    ignores = "lm_head"
    in_features = 72

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Rounded number by number."""
        weight = weight.bfloat16().float()
        rounded = torch.zeros_like(weight)
        for row in range(len(weight)):
            for start in range(0, weight.shape[1], 32):
                block = weight[row, start : start + 32].tolist()
                rounded[row, start : start + 32] = torch.tensor(by_hand(block))
        return {"weight": weight}, rounded


def by_hand(block: list[float]) -> list[float]:
    largest = max(map(abs, block))
    scale = 2.0 ** (math.frexp(largest)[1] - 3) if largest else 1.0
    found = []
    for value in block:
        size = min(abs(value) / scale, 6.0)
        best = min(range(8), key=lambda code: (abs(VALUES[code] - size), code % 2))
        found.append(math.copysign(VALUES[best] * scale, value))
    return found


def test_ties_go_to_the_even_code() -> None:
    block = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -2.5, -5.0, 7.0, -7.9]
    weight = torch.tensor([block])
    spec = LinearSpec("m.o", len(block), (1,), "float32")
    layer = Mxfp4.from_config(None, OPS).for_layer(spec)
    found = dequantized(layer.finish(spec, {"weight": weight}).data[0])
    assert found.tolist() == [
        [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -2.0, -4.0, 6.0, -6.0]
    ]
    assert layer.kept_bytes(spec) == 7 + 1


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 140, 254])
def test_every_scale_is_exact(scale: int) -> None:
    blocks = torch.arange(64, dtype=torch.uint8).view(2, 2, 16) * 4
    scales = torch.full((2, 2), scale, dtype=torch.uint8)
    spec = LinearSpec(NAME, 64, (2,), "float32")
    tensors = {"weight_blocks": blocks, "weight_scales": scales}
    state = SmallFloatWeight(OPS, STORED).finish(spec, tensors)
    exact = meant(blocks, scales)
    found = dequantized(state.data[0], torch.float64)
    assert torch.equal(found, exact)


def test_only_experts_are_blocks() -> None:
    method = Mxfp4.from_config(TestStored.config, OPS)
    assert isinstance(method.for_layer(LinearSpec(NAME, 64, (2,), "float32")), SmallFloatWeight)
    for name in (
        "lm_head",
        "model.layers.0.self_attn.experts.0.q_proj",
        "model.layers.0.mlp.router",
    ):
        assert type(method.for_layer(LinearSpec(name, 64, (2,), "float32"))) is PlainWeight, name


def test_refusals() -> None:
    layer = SmallFloatWeight(OPS, STORED)
    with pytest.raises(
        ConfigError,
        match=r"3\.down_proj\.weight_blocks': .* in_features = 40: must be a multiple of 32",
    ):
        layer.create(LinearSpec(NAME, 40, (2,), "float32"))
    tensors = {
        "weight_blocks": torch.zeros(2, 2, 16, dtype=torch.uint8),
        "weight_scales": torch.full((2, 2), 255, dtype=torch.uint8),
    }
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj': a scale \(E8M0\) is 255"):
        layer.finish(LinearSpec(NAME, 64, (2,), "float32"), tensors)
    with pytest.raises(ConfigError, match="group_size"):
        Mxfp4.from_config({"quant_method": "mxfp4", "group_size": 32}, OPS)
