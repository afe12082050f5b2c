from __future__ import annotations

from typing import Any, ClassVar

import pytest
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearMethod, LinearSpec
from headrace_quant.awq import AWQWeight
from headrace_quant.gptq import GPTQWeight
from headrace_quant.none import PlainWeight
from headrace_testing.model.quant_methods import QuantConformance
from headrace_testing.model.quantized_layers import awq_tensors, gptq_tensors


def config(**fields: Any) -> dict[str, Any]:
    """As AutoRound writes it."""
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "autoround_version": "0.9.0", "iters": 200,
        "seqlen": 2048, "batch_size": 8, **fields,
    }  # fmt: skip


class TestAsGPTQ(QuantConformance):
    name = "auto-round"
    config = config()
    ignores = "lm_head"
    in_features = 128
    out_parts = (64, 32)
    refused: ClassVar = {
        "bits": 5,
        "group_size": 3,
        "data_type": "fp4",
        "packing_format": "auto_round:auto_gptq:zp",
        "extra_config": ["a"],
        "block_name_to_quantize": 7,
    }

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return gptq_tensors(weight, bits=4, group_size=32, symmetric=True)


class TestAsAWQ(TestAsGPTQ):
    config = config(packing_format="auto_round:auto_awq", sym=False)
    refused: ClassVar = {"bits": 8}

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return awq_tensors(weight, group_size=32)


class TestOlderFiles(TestAsAWQ):
    """They say the layout in ``backend``."""

    config: ClassVar = {
        key: value for key, value in config(backend="awq:marlin", sym=False).items()
        if key != "packing_format"
    }  # fmt: skip
    refused: ClassVar = {"backend": "cutlass"}


def layer(name: str, **fields: Any) -> LinearMethod:
    method = TestAsGPTQ().method(config=config(**fields))
    return method.for_layer(LinearSpec(name, 64, (64,), "float32"))


EXTRA = {
    "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64},
    "model.layers.1.mlp.down_proj": {"bits": 16},
    ".*layers\\.2\\..*": {"bits": 2},
    "lm_head": {"bits": 8, "data_type": "int"},
}


def test_modules_have_settings_of_their_own() -> None:
    forms = []
    for name in ("layers.0.mlp.down_proj", "layers.2.mlp.up_proj", "layers.3.mlp.up_proj"):
        found = layer(f"model.{name}", extra_config=EXTRA)
        assert isinstance(found, GPTQWeight)
        forms.append((found.form.bits, found.form.group_size))
    assert forms == [(8, 64), (2, 32), (4, 32)]
    assert type(layer("model.layers.1.mlp.down_proj", extra_config=EXTRA)) is PlainWeight


def test_the_head_is_quantized_where_it_is_named() -> None:
    assert type(layer("lm_head")) is PlainWeight
    assert type(layer("lm_head", extra_config=EXTRA)) is GPTQWeight


@pytest.mark.parametrize(
    "blocks",
    [
        "model.language_model.layers",
        ["model.language_model.layers"],
        "a.b, model.language_model.layers",
    ],
)
def test_towers_outside_the_blocks_are_plain(blocks: Any) -> None:
    names = ("model.language_model.layers.0.mlp.up_proj", "model.visual.blocks.0.mlp.up_proj")
    kinds = [type(layer(name, block_name_to_quantize=blocks)) for name in names]
    assert kinds == [GPTQWeight, PlainWeight]


def test_awq_has_four_bits_only() -> None:
    extra = {"model.layers.0.mlp.down_proj": {"bits": 8}}
    with pytest.raises(ConfigError, match=r"down_proj.*bits = 8"):
        layer("x", packing_format="auto_round:auto_awq", extra_config=extra)
    assert isinstance(layer("model.x", packing_format="auto_round:auto_awq"), AWQWeight)
