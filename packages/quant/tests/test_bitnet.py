"""Ternary weights and int8 activations, against the formulas of the published layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.bitnet import BitNet, unpack_ternary
from headrace_quant.none import PlainWeight

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
NAME = "model.layers.0.mlp.down_proj"
SPEC = LinearSpec(NAME, 24, (8, 4), "float32")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ternary(rows: int, columns: int) -> Tensor:
    chooser = torch.Generator().manual_seed(rows)
    return torch.randint(-1, 2, (rows, columns), generator=chooser).to(torch.int8)


def packed(values: Tensor) -> Tensor:
    """Four quarters of the rows, two bits each."""
    codes = (values + 1).to(torch.uint8).chunk(4)
    return codes[0] | codes[1] << 2 | codes[2] << 4 | codes[3] << 6


def in_int8(x: Tensor) -> Tensor:
    scale = 127 / x.abs().amax(dim=-1, keepdim=True)
    return (x * scale).round().clamp(-128, 127) / scale


def method(**settings: Any) -> Any:
    return BitNet.from_config({"quant_method": "bitnet", **settings}, OPS)


def test_four_rows_are_in_a_byte() -> None:
    values = ternary(8, 5)
    assert torch.equal(unpack_ternary(packed(values)), values)


@pytest.mark.parametrize(
    ("settings", "divides"),
    [({}, True), ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, False)],
    ids=["bitlinear", "autobitlinear"],
)
def test_packed_weights(settings: dict[str, Any], divides: bool) -> None:
    """Two fused parts, each with its own scale."""
    layer = method(**settings).for_layer(SPEC)
    parts, scales = [ternary(8, 24), ternary(4, 24)], torch.tensor([0.7, 2.5])
    wanted = layer.create(SPEC)
    assert wanted["weight"].shape == (3, 24)
    assert wanted["weight_scale"].shape == (2,)
    assert wanted["weight_scale"].by_part
    given = {"weight": torch.cat([packed(p) for p in parts]), "weight_scale": scales}
    x = random(5, 24)
    factors = 1 / scales if divides else scales
    weight = torch.cat([part * factor for part, factor in zip(parts, factors)])
    out = layer.apply(layer.finish(SPEC, given), x)
    torch.testing.assert_close(out, in_int8(x) @ weight.T)
    assert layer.needs_whole


def test_weights_rounded_while_loading() -> None:
    layer = method(linear_class="autobitlinear", quantization_mode="online").for_layer(SPEC)
    floats, x = random(12, 24, seed=1), random(5, 24, seed=2)
    rounded = []
    for part in floats.split([8, 4]):
        scale = 1 / part.abs().mean()
        rounded.append((part * scale).round().clamp(-1, 1) / scale)
    out = layer.apply(layer.finish(SPEC, {"weight": floats}), x)
    torch.testing.assert_close(out, in_int8(x) @ torch.cat(rounded).T)


def test_the_head_and_named_layers_are_plain() -> None:
    bitnet = method(modules_to_not_convert=["model.layers.0"])
    for name in ("lm_head", NAME):
        assert isinstance(bitnet.for_layer(LinearSpec(name, 24, (8,), "float32")), PlainWeight)
    other = LinearSpec("model.layers.1.mlp.down_proj", 24, (8,), "float32")
    assert not isinstance(bitnet.for_layer(other), PlainWeight)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "needs a checkpoint"),
        ({"linear_class": "linear"}, "linear_class = 'linear'"),
        ({"quantization_mode": "later"}, "quantization_mode = 'later'"),
        ({"use_rms_norm": True}, "use_rms_norm = True"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"bits": 3}, "bits"),
    ],
    ids=str,
)
def test_refusals(config: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        BitNet.from_config(config if config is None else {"quant_method": "bitnet", **config}, OPS)


def test_contents_that_cannot_be() -> None:
    layer = method().for_layer(SPEC)
    good = torch.zeros(3, 24, dtype=torch.uint8)
    for given, words in (
        ({"weight": good + 3, "weight_scale": torch.ones(2)}, "codes"),
        ({"weight": good, "weight_scale": torch.tensor([1.0, 0.0])}, "weight_scale"),
    ):
        with pytest.raises(WeightsError, match=words):
            layer.finish(SPEC, given)
    with pytest.raises(UnsupportedModel, match="cannot be packed"):
        layer.create(LinearSpec(NAME, 24, (6,), "float32"))
