from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec
from headrace_testing.model.quant_methods import QuantConformance

WEIGHTS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
    "block_structure": None, "dynamic": False, "actorder": None, "observer": "minmax",
    "observer_kwargs": {},
}  # fmt: skip


ACTIVATIONS: dict[str, Any] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None,
    "block_structure": None, "dynamic": True, "actorder": None, "observer": None,
}  # fmt: skip


def config(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"], "weights": {**WEIGHTS, **weights},
                "input_activations": activations, "output_activations": None,
            }
        },
    }  # fmt: skip


def words(codes: Tensor, bits: int) -> Tensor:
    """Packed by arithmetic, word by word, from the format's description."""
    per_word = 32 // bits
    packed = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        packed |= (codes[:, place::per_word].long() + 2 ** (bits - 1)) << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


REFUSED: dict[str, Any] = {
    "kv_cache_scheme": {"num_bits": 8},
    "quantization_status": "frozen",
    "config_groups": {},
    "config_groups.group_0.output_activations": {"num_bits": 8},
    "config_groups.group_0.weights.num_bits": 3,
    "config_groups.group_0.weights.type": "float",
    "config_groups.group_0.weights.strategy": "tensor",
    "config_groups.group_0.weights.actorder": "group",
    "config_groups.group_0.weights.dynamic": True,
    "config_groups.group_0.format": "marlin-24",
    "ignore": "lm_head",
}


class TestIntQuantized(QuantConformance):
    name = "compressed-tensors"
    config = config("int-quantized")
    ignores = "lm_head"
    refused: ClassVar = {
        **REFUSED,
        "config_groups.group_0.weights.num_bits": 4,
        "config_groups.group_0.weights.symmetric": False,
        "config_groups.group_0.weights.strategy": "group",
        "config_groups.group_0.weights.group_size": 128,
    }

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().max(dim=1, keepdim=True).values / 127
        scales[scales == 0] = 1.0
        integers = torch.clamp(torch.round(weight / scales), -128, 127).to(torch.int8)
        return {"weight": integers, "weight_scale": scales}, integers.float() * scales


class TestInt8Activations(TestIntQuantized):
    config = config("int-quantized", ACTIVATIONS)
    int8_activations = True
    refused: ClassVar = {
        f"config_groups.group_0.input_activations.{key}": value
        for key, value in {
            "num_bits": 4, "type": "float", "symmetric": False, "strategy": "tensor",
            "dynamic": False,
        }.items()
    }  # fmt: skip


class PackQuantized(QuantConformance):
    name = "compressed-tensors"
    ignores = "lm_head"
    bits: ClassVar[int]
    group_size: ClassVar[int | None] = None
    has_zeros: ClassVar[bool] = False
    refused: ClassVar = {
        **REFUSED,
        "config_groups.group_0.input_activations": {"num_bits": 8},
    }

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = self.group_size or weight.shape[1]
        groups = weight.view(weight.shape[0], -1, size)
        low, high = -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        zeros = torch.zeros(groups.shape[:2])
        if self.has_zeros:
            least, most = groups.amin(2), groups.amax(2)
            scales = ((most - least) / (high - low)).bfloat16().float().clamp(min=1e-6)
            zeros = (low - least / scales).round().clamp(low, high)
        else:
            scales = (groups.abs().amax(2) / high).bfloat16().float().clamp(min=1e-6)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(low, high)
        meant = ((codes - zeros[..., None]) * scales[..., None]).view(weight.shape)
        tensors = {"weight_packed": words(codes.view(weight.shape), self.bits)}
        tensors["weight_scale"] = scales
        if self.has_zeros:
            tensors["weight_zero_point"] = words(zeros.T.contiguous(), self.bits).T
        return tensors, meant

    def test_odd_input_size_is_refused(self) -> None:
        spec = LinearSpec("m.o", 30, (8,), "float32")
        with pytest.raises(ConfigError, match=r"m\.o.*30"):
            self.method().for_layer(spec).create(spec)


class TestW8A16(PackQuantized):
    bits = 8
    config = config("pack-quantized")


class TestW4A16(PackQuantized):
    bits, group_size = 4, 32
    in_features = 96
    config = config("pack-quantized", num_bits=4, strategy="group", group_size=32)
    refused: ClassVar = {
        **PackQuantized.refused,
        "config_groups.group_0.weights.group_size": 33,
    }


class TestW4A16Channel(PackQuantized):
    bits = 4
    in_features = 40
    config = config("pack-quantized", num_bits=4, actorder="weight")


class TestW4A16ZeroPoints(PackQuantized):
    bits, group_size, has_zeros = 4, 32, True
    in_features, out_parts = 64, (24, 16)
    config = config("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False)

    def test_parts_that_end_within_a_word_are_refused(self) -> None:
        spec = LinearSpec("m.o", 64, (12, 4), "float32")
        with pytest.raises(ConfigError, match=r"m\.o.*out_features = 12"):
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


def test_fused_parts_may_be_stored_differently() -> None:
    groups = {
        "a": {"targets": ["Linear"], "weights": WEIGHTS, "format": "int-quantized"},
        "b": {"targets": ["m.k"], "weights": WEIGHTS, "format": "pack-quantized"},
    }
    method = TestIntQuantized().method(config={**config("int-quantized"), "config_groups": groups})
    spec = LinearSpec("m.qk", 8, (8, 8), "float32", part_names=("m.q", "m.k"))
    assert set(method.for_layer(spec).create(spec)) == {
        "weight@0", "weight_scale@0", "weight_packed@1", "weight_scale@1",
    }  # fmt: skip


def test_layers_outside_all_targets_are_plain() -> None:
    groups = {"a": {"targets": ["re:.*mlp.*"], "weights": WEIGHTS}}
    method = TestIntQuantized().method(config={**config("int-quantized"), "config_groups": groups})
    assert method.for_layer(LinearSpec("m.attn.o", 8, (8,), "float32")).is_plain
