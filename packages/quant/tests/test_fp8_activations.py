"""Checkpoints in FP8 whose configs say that activations are FP8, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drawn_floats import drawn
from torch import Tensor

from headrace_core import plugins
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_testing.model.quant_methods import QuantConformance

OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
TOKEN: dict[str, Any] = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
}  # fmt: skip


def compressed(inputs: Any, strategy: str = "channel", block: Any = None) -> dict[str, Any]:
    """As llm-compressor's FP8_DYNAMIC, with other activations."""
    weights = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False,
        "block_structure": block,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": weights, "input_activations": inputs,
        }},
    }  # fmt: skip


class TestFp8Dynamic(QuantConformance):
    """llm-compressor's FP8_DYNAMIC."""

    name = "compressed-tensors"
    ignores = "lm_head"
    fp8_activations = True
    config: ClassVar = compressed(TOKEN)
    refused: ClassVar = {"config_groups.group_0.input_activations.num_bits": 4}

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        scales = torch.rand(len(weight), 1, generator=torch.Generator().manual_seed(9)) / 100
        method = self.method()
        method.for_layer(spec)
        stored = [
            (f"{spec.name}.{suffix}", tensor, Path("file"))
            for suffix, tensor in (("weight", codes), ("weight_scale", scales))
        ]
        found = method.decode(stored, spec.dtype, lambda _: False)
        return {name.removeprefix(f"{spec.name}."): t for name, t, _ in found}, numbers * scales


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", **changes}


def modelopt(algorithm: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm}


BLOCKS = {"weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (compressed(TOKEN), "fp8"),
        (compressed(TOKEN, "tensor"), "fp8"),
        (compressed(TOKEN, "block", [64, 64]), "fp8"),
        (compressed(None), "float"),
        (compressed({**TOKEN, "strategy": "tensor"}), "float"),
        (compressed({**TOKEN, "dynamic": False, "strategy": "tensor"}), "float"),
        (compressed({**TOKEN, "strategy": "group", "group_size": 128}), "float"),
        (compressed({**TOKEN, "symmetric": False}), "float"),
        (fp8(activation_scheme="dynamic"), "fp8"),
        (fp8(activation_scheme="dynamic", **BLOCKS), "fp8"),
        (fp8(activation_scheme="static"), "float"),
        (fp8(), "float"),
        (None, "float"),
        (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "fp8"),
        (modelopt("FP8"), "float"),
        (modelopt("FP8_PB_WO"), "float"),
        (modelopt("MXFP8"), "float"),
    ],
    ids=str,
)
def test_the_form_that_a_checkpoint_names(config: dict[str, Any] | None, form: str) -> None:
    name = "fp8" if config is None else config["quant_method"]
    method = plugins.load("headrace.quantization", name).from_config(config, OPS)
    layer = method.for_layer(LinearSpec("model.layers.0.mlp.down_proj", 128, (64,), "float32"))
    assert layer.activations == form
