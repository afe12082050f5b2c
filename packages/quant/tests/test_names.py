"""Names that other engines have for a format, and names of formats that are not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.auto_round import AutoRound
from headrace_quant.gptq import GPTQ
from headrace_quant.int_linear_methods import RoundedWeight

GROUP = "headrace.quantization"
OPS = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})


def load(name: str) -> type[QuantMethod]:
    found: type[QuantMethod] = plugins.load(GROUP, name)
    return found


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gptq_marlin", GPTQ),
        ("gptq_bitblas", GPTQ),
        ("bitblas", GPTQ),
        ("moe_wna16", GPTQ),
        ("inc", AutoRound),
        ("intel/auto-round", AutoRound),
    ],
)
def test_other_names(name: str, method: type[QuantMethod]) -> None:
    assert load(name) is method


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_method": "bitblas"}, r"quant_method = 'bitblas'.*permuted"),
        ({"checkpoint_format": "bitblas"}, r"checkpoint_format = 'bitblas'"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin'"),
        ({"linear_quant_method": "awq"}, r"linear_quant_method = 'awq': must be 'gptq'"),
    ],
)
def test_layouts_of_single_kernels_are_refused(fields: dict[str, Any], message: str) -> None:
    block = {"quant_method": "gptq", "bits": 4, "group_size": 32, **fields}
    with pytest.raises(ConfigError, match=message):
        GPTQ.from_config(block, OPS)


def test_deepspeed_is_refused_by_name() -> None:
    method = load("deepspeedfp")
    assert "DeepSpeed" in method.refuse(QuantNeed("bfloat16", "cpu"))[0]
    for config in (None, {"quant_method": "deepspeedfp", "bits": 6}):
        with pytest.raises(ConfigError, match="'deepspeedfp': DeepSpeed's layout"):
            method.from_config(config, OPS)


def test_experts_in_int8_and_all_else_in_floats() -> None:
    method = load("experts_int8").from_config(None, OPS)
    experts = LinearSpec("m.layers.0.mlp.experts.3.down_proj", 64, (8,), "float32")
    layer = method.for_layer(experts)
    assert isinstance(layer, RoundedWeight)
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    found = layer.apply(layer.finish(experts, {"weight": weight}), torch.eye(64)).T
    assert 0 < float((found - weight).abs().max()) <= float(weight.abs().max()) / 254 + 1e-6
    for name in ("m.layers.0.self_attn.o_proj", "lm_head", "m.layers.0.mlp.gate_up_proj"):
        assert method.for_layer(LinearSpec(name, 64, (8,), "float32")).is_plain
    assert list(method.decode([], "float32", lambda _: False)) == []
    with pytest.raises(ConfigError, match="no stored"):
        load("experts_int8").from_config({"quant_method": "experts_int8"}, OPS)


def test_experts_in_int8_of_a_model_without_any() -> None:
    method = load("experts_int8").from_config(None, OPS)
    method.for_layer(LinearSpec("m.layers.0.mlp.down_proj", 64, (8,), "float32"))
    with pytest.raises(ConfigError, match="'experts_int8': the model has no experts"):
        method.decode([], "float32", lambda _: False)
