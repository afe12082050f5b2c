"""4-bit floats in blocks, against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import LinearSpec, QuantNeed
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.mxfp4 import BLOCK, Mxfp4, Mxfp4Weight, dequantize
from headrace_quant.none import PlainWeight

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
NAME = "model.layers.0.mlp.experts.3.down_proj"


def spec(name: str = NAME, inputs: int = 64, dtype: str = "float32") -> LinearSpec:
    return LinearSpec(name, inputs, (2,), dtype)


def tensors(scale: int = 127) -> dict[str, torch.Tensor]:
    blocks = torch.arange(2 * 2 * 16, dtype=torch.uint8).view(2, 2, 16) * 4
    return {"weight_blocks": blocks, "weight_scales": torch.full((2, 2), scale, dtype=torch.uint8)}


def test_values_of_all_codes() -> None:
    codes = torch.tensor([[[low | (low + 8) << 4 for low in range(8)] * 2]], dtype=torch.uint8)
    out = dequantize(codes, torch.tensor([[128]], dtype=torch.uint8), torch.float32)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert out[0, :16].tolist() == [sign * 2 * v for v in values for sign in (1, -1)]
    assert out.shape == (1, BLOCK)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0, 100, 127, 140])
def test_bfloat16_loses_nothing(scale: int, dtype: str) -> None:
    given = tensors(scale)
    exact = dequantize(given["weight_blocks"], given["weight_scales"], torch.float64)
    out = dequantize(given["weight_blocks"], given["weight_scales"], getattr(torch, dtype))
    assert torch.equal(out.double(), exact)


def test_a_layer_multiplies_with_the_floats() -> None:
    method, given = Mxfp4Weight(OPS), tensors()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    weight = dequantize(given["weight_blocks"], given["weight_scales"], torch.float32)
    out = method.apply(method.finish(spec(), given), x)
    torch.testing.assert_close(out, x @ weight.T)
    assert {k: t.shape for k, t in method.create(spec()).items()} == {
        "weight_blocks": (2, 2, 16), "weight_scales": (2, 2),
    }  # fmt: skip


def test_only_experts_are_blocks() -> None:
    method = Mxfp4.from_config(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, OPS
    )
    assert isinstance(method.for_layer(spec()), Mxfp4Weight)
    for name in (
        "lm_head",
        "model.layers.0.self_attn.experts.0.q_proj",
        "model.layers.0.mlp.router",
    ):
        assert type(method.for_layer(spec(name))) is PlainWeight, name


def test_refusals() -> None:
    with pytest.raises(UnsupportedModel, match="blocks of 32 inputs; this rank has 40"):
        Mxfp4Weight(OPS).create(spec(inputs=40))
    with pytest.raises(WeightsError, match=r"experts\.3\.down_proj: a scale"):
        Mxfp4Weight(OPS).weight(spec(), tensors(255))
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        Mxfp4.from_config(None, OPS)
    with pytest.raises(ConfigError, match="group_size"):
        Mxfp4.from_config({"quant_method": "mxfp4", "group_size": 32}, OPS)
    with pytest.raises(ConfigError, match="modules_to_not_convert"):
        Mxfp4.from_config({"quant_method": "mxfp4", "modules_to_not_convert": "x"}, OPS)
    assert Mxfp4.refuse(QuantNeed("float16", "cpu"))
    assert not Mxfp4.refuse(QuantNeed("bfloat16", "cpu"))
