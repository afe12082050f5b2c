from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec
from headrace_core.testing.quant import QuantConformance

WEIGHTS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
    "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip


def config(form: str) -> dict[str, Any]:
    """As llm-compressor writes it for W8A16."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": WEIGHTS, "input_activations": None,
                "output_activations": None,
            }
        },
    }  # fmt: skip


def integers_and_scales(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = (weight.abs().max(dim=1, keepdim=True).values / 127).bfloat16().float()
    scales[scales == 0] = 1.0
    return torch.clamp(torch.round(weight / scales), -128, 127).to(torch.int8), scales


REFUSED: dict[str, Any] = {
    "kv_cache_scheme": {"num_bits": 8},
    "quantization_status": "frozen",
    "config_groups": {},
    "config_groups.group_0.input_activations": {"num_bits": 8},
    "config_groups.group_0.weights.num_bits": 4,
    "config_groups.group_0.weights.type": "float",
    "config_groups.group_0.weights.symmetric": False,
    "config_groups.group_0.weights.strategy": "group",
    "config_groups.group_0.weights.actorder": "group",
    "config_groups.group_0.format": "marlin-24",
    "ignore": "lm_head",
}


@pytest.mark.spec("QUANT-CT")
class TestIntQuantized(QuantConformance):
    name = "compressed-tensors"
    config = config("int-quantized")
    ignores = "lm_head"
    refused = REFUSED

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        integers, scales = integers_and_scales(weight)
        return {"weight": integers, "weight_scale": scales}, integers.float() * scales


@pytest.mark.spec("QUANT-CT")
class TestPackQuantized(QuantConformance):
    name = "compressed-tensors"
    config = config("pack-quantized")
    ignores = "lm_head"
    refused = REFUSED

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Packed by arithmetic, word by word, from the format's description."""
        integers, scales = integers_and_scales(weight)
        words = torch.zeros(weight.shape[0], weight.shape[1] // 4, dtype=torch.int64)
        for place in range(4):
            words |= (integers[:, place::4].long() + 128) << (8 * place)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        tensors = {"weight_packed": words, "weight_scale": scales}
        return tensors, integers.float() * scales

    def test_odd_input_size_is_refused(self) -> None:
        spec = LinearSpec("m.o", 30, (8,), "float32")
        with pytest.raises(ConfigError, match=r"m\.o.*30"):
            self.method().for_layer(spec).create(spec)


def test_online_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint"):
        TestIntQuantized().method(config=None)


def test_target_by_name_wins_over_pattern_and_class() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS, "format": "int-quantized"},
        "b": {"targets": ["re:.*down"], "weights": WEIGHTS, "format": "pack-quantized"},
        "c": {"targets": ["m.1.down"], "weights": WEIGHTS, "format": "int-quantized"},
    }
    method = TestIntQuantized().method(config={**config("int-quantized"), "config_groups": groups})

    def suffixes(name: str) -> set[str]:
        spec = LinearSpec(name, 8, (8,), "float32")
        return set(method.for_layer(spec).create(spec))

    assert suffixes("m.0.up") == {"weight", "weight_scale"}
    assert suffixes("m.0.down") == {"weight_packed", "weight_scale"}
    assert suffixes("m.1.down") == {"weight", "weight_scale"}


def test_fused_parts_must_be_stored_alike() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS, "format": "int-quantized"},
        "b": {"targets": ["m.k"], "weights": WEIGHTS, "format": "pack-quantized"},
    }
    method = TestIntQuantized().method(config={**config("int-quantized"), "config_groups": groups})
    spec = LinearSpec("m.qk", 8, (8, 8), "float32", part_names=("m.q", "m.k"))
    with pytest.raises(ConfigError, match=r"m\.q, m\.k"):
        method.for_layer(spec)


def test_layers_outside_all_targets_are_plain() -> None:
    groups = {"a": {"targets": ["re:.*mlp.*"], "weights": WEIGHTS}}
    method = TestIntQuantized().method(config={**config("int-quantized"), "config_groups": groups})
    assert method.for_layer(LinearSpec("m.attn.o", 8, (8,), "float32")).is_plain
