from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drawn_floats import drawn, exponents
from safetensors import safe_open
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_quant.compressed_tensors import CompressedTensors
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

LIBRARY = Path(__file__).parent / "data" / "compressed-tensors-0.20.0.safetensors"
"""Layers that compressed-tensors 0.20.0 compressed, by case: its tensors, ``meant`` by its own decompression;
the file's metadata has format and arguments of each."""

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
    """Each row as one long integer, from the format's description."""
    packed = []
    for row in codes.tolist():
        run = sum((int(code) + 2 ** (bits - 1)) << (bits * place) for place, code in enumerate(row))
        packed.append([(run >> 32 * i) & 0xFFFFFFFF for i in range(len(row) * bits // 32)])
    unsigned = torch.tensor(packed, dtype=torch.int64)
    return torch.where(unsigned >= 2**31, unsigned - 2**32, unsigned).to(torch.int32)


REFUSED: dict[str, Any] = {
    "kv_cache_scheme.num_bits": 4,
    "quantization_status": "frozen",
    "config_groups": {},
    "config_groups.group_0.output_activations": {"num_bits": 8},
    "sparsity_config": {"format": "sparse-24-bitmask"},
    "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}},
    "config_groups.group_0.weights.num_bits": 9,
    "config_groups.group_0.weights.type": "float",
    "config_groups.group_0.weights.strategy": "block",
    "config_groups.group_0.weights.actorder": "other",
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
        "config_groups.group_0.weights.num_bits": 6,
        "config_groups.group_0.weights.actorder": "group",
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
            "num_bits": 4, "type": "float", "strategy": "tensor",
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
        "config_groups.group_0.input_activations.num_bits": 4,
        "config_groups.group_0.weights.strategy": "tensor",
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
        with pytest.raises(
            ConfigError, match=r"m\.o\.weight_zero_point.*outputs = 12.*multiple of 8"
        ):
            self.method().for_layer(spec).create(spec)


class TestW4A8(TestW4A16):
    """Activations in int8, as llm-compressor's W4A8."""

    int8_activations = True
    config = config("pack-quantized", ACTIVATIONS, num_bits=4, strategy="group", group_size=32)


class TestW3A16(PackQuantized):
    """Values straddle words."""

    bits, group_size = 3, 16
    in_features = 96
    config = config("pack-quantized", num_bits=3, strategy="group", group_size=16)

    def test_odd_input_size_is_refused(self) -> None:
        spec = LinearSpec("m.o", 48, (8,), "float32")
        with pytest.raises(ConfigError, match=r"m\.o.*48.*multiple of 32"):
            self.method().for_layer(spec).create(spec)


class TestW6A16ZeroPoints(PackQuantized):
    bits, has_zeros = 6, True
    in_features, out_parts = 64, (32, 16)
    config = config("pack-quantized", num_bits=6, symmetric=False)


class TestByImportance(PackQuantized):
    """``actorder: group``: inputs belong to groups in no order."""

    bits, group_size, has_zeros = 4, 32, True
    in_features, out_parts = 96, (24, 16)
    config = config(
        "pack-quantized",
        num_bits=4,
        strategy="group",
        group_size=32,
        symmetric=False,
        actorder="group",
    )

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = torch.arange(spec.in_features) // 32
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(3))]
        order = torch.argsort(groups, stable=True)
        tensors, meant = super().make_tensors(spec, weight[:, order])
        back = torch.argsort(order)
        codes = torch.stack([(tensors["weight_packed"] >> 4 * i) & 15 for i in range(8)], -1)
        tensors["weight_packed"] = words(codes.flatten(1)[:, back] - 8, 4)
        return {**tensors, "weight_g_idx": groups.int()}, meant[:, back]

    def test_one_rank_only(self) -> None:
        assert self.method().for_layer(self.spec()).needs_whole

    def test_an_order_that_was_not_set(self) -> None:
        spec = self.spec()
        tensors, meant = super().make_tensors(spec, self.weight(spec))
        tensors["weight_g_idx"] = torch.full((spec.in_features,), -1, dtype=torch.int32)
        state = self.method().for_layer(spec).finish(spec, tensors)
        torch.testing.assert_close(dequantized(state.data[0]), meant)


class IntGroups(QuantConformance):
    """``int-quantized`` with scales of groups and zero points."""

    name = "compressed-tensors"
    bits: ClassVar[int] = 8

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        half, groups = 2 ** (self.bits - 1), weight.view(len(weight), -1, 16)
        least, most = groups.amin(2), groups.amax(2)
        scales = ((most - least) / (2 * half - 1)).clamp(min=1e-6)
        zeros = (-half - least / scales).round().clamp(-half, half - 1)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(-half, half - 1)
        meant = ((codes - zeros[..., None]) * scales[..., None]).view(weight.shape)
        tensors = {"weight": codes.view(weight.shape), "weight_zero_point": zeros}
        return {"weight_scale": scales, **{k: t.to(torch.int8) for k, t in tensors.items()}}, meant


class TestIntGroups(IntGroups):
    in_features = 48
    config = config("int-quantized", strategy="group", group_size=16, symmetric=False)


class TestInt4Groups(IntGroups):
    bits = 4
    in_features = 48
    config = config("int-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False)

    def test_integers_of_more_bits_are_held_in_eight(self) -> None:
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        zero, scale = (tensors[f"weight_{name}"][0, 0].item() for name in ("zero_point", "scale"))
        for code, bits in ((7, 4), (12, 8)):
            tensors["weight"][0, 0] = code
            state = self.method().for_layer(spec).finish(spec, dict(tensors))
            assert state.data[0].bits == bits
            assert dequantized(state.data[0])[0, 0].item() == pytest.approx((code - zero) * scale)


class TestIntTensor(QuantConformance):
    """A scale and a zero point of each fused module."""

    name = "compressed-tensors"
    config = config("int-quantized", strategy="tensor", symmetric=False)

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = torch.tensor([float(part.abs().max()) / 100 for part in weight.split((24, 12))])
        zeros = torch.tensor([3.0, -20.0])
        rows = torch.tensor(spec.out_parts)
        wide = [each.repeat_interleave(rows)[:, None] for each in (scales, zeros)]
        codes = (weight / wide[0] + wide[1]).round().clamp(-128, 127)
        tensors = {"weight": codes.to(torch.int8), "weight_zero_point": zeros.to(torch.int8)}
        return {**tensors, "weight_scale": scales}, (codes - wide[1]) * wide[0]


FLOAT = {"type": "float", "observer": "minmax"}


class SmallFloats(QuantConformance):
    """Codes drawn at random."""

    name = "compressed-tensors"
    in_features = 96
    ignores = "lm_head"
    element: ClassVar[str] = "e2m1"
    codes: ClassVar[str] = "weight_packed"
    refused: ClassVar = {
        "config_groups.group_0.weights.num_bits": 5,
        "config_groups.group_0.weights.type": "int",
        "config_groups.group_0.weights.symmetric": False,
        "config_groups.group_0.weights.strategy": "channel",
        "config_groups.group_0.weights.group_size": 64,
        "config_groups.group_0.input_activations.type": "int",
    }

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        packed, numbers = drawn(weight, self.element)
        stored, scales = exponents(len(weight), spec.in_features // 32)
        return {self.codes: packed, "weight_scale": stored}, numbers * scales.repeat_interleave(
            32, 1
        )

    def test_activation_scales_are_passed_over(self) -> None:
        method = self.method()
        names = ("m.q.input_global_scale", "lm_head.input_scale", "m.q.weight_packed")
        stored = [(name, torch.ones(1), Path("f")) for name in names]
        kept = [name for name, _, _ in method.decode(stored, "float32", lambda _: False)]
        assert kept == ["lm_head.input_scale", "m.q.weight_packed"]


class TestMxfp4(SmallFloats):
    config = config(
        "mxfp4-pack-quantized",
        {"type": "float", "num_bits": 4, "dynamic": True},
        **FLOAT,
        num_bits=4,
        strategy="group",
        group_size=32,
    )

    def test_a_scale_that_is_no_number(self) -> None:
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        tensors["weight_scale"][2, 1] = 255
        with pytest.raises(WeightsError, match=r"gate_up_proj.*255"):
            self.method().for_layer(spec).finish(spec, tensors)


class TestMxfp6(SmallFloats):
    element = "e2m3"
    config = config("mxfp6-pack-quantized", **FLOAT, num_bits=6, strategy="group", group_size=32)


class TestMxfp8(SmallFloats):
    element, codes = "e4m3", "weight"
    config = config("mxfp8-quantized", **FLOAT, strategy="group", group_size=32)

    def test_a_code_that_is_no_number(self) -> None:
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        tensors["weight"].view(torch.uint8)[3, 5] = 255
        with pytest.raises(WeightsError, match=r"gate_up_proj.*has NaN"):
            self.method().for_layer(spec).finish(spec, tensors)


class TestNvfp4(SmallFloats):
    """The outer scale of each fused module divides."""

    config = config(
        "nvfp4-pack-quantized",
        {"type": "float", "num_bits": 4, "dynamic": "local", "strategy": "tensor_group"},
        **FLOAT,
        num_bits=4,
        strategy="tensor_group",
        group_size=16,
    )

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        packed, values = drawn(weight, "e2m1")
        groups = spec.in_features // 16
        scales = 50 * torch.rand(len(weight), groups, generator=torch.Generator().manual_seed(9))
        scales[0] *= 8
        scales = scales.to(torch.float8_e4m3fn)
        outer = torch.tensor([300.0, 700.0])
        rows = outer.repeat_interleave(torch.tensor(spec.out_parts))[:, None]
        meant = values * scales.float().repeat_interleave(16, 1) / rows
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": outer}
        return tensors, meant

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
    def test_an_impossible_outer_scale(self, bad: float) -> None:
        spec = self.spec()
        tensors, _ = self.make_tensors(spec, self.weight(spec))
        tensors["weight_global_scale"][1] = bad
        with pytest.raises(WeightsError, match=r"gate_up_proj.*weight_global_scale"):
            self.method().for_layer(spec).finish(spec, tensors)


def library(case: str) -> tuple[CompressedTensors, dict[str, Tensor], Tensor]:
    with safe_open(LIBRARY, "pt") as file:
        arguments = json.loads(file.metadata()[case])
        names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118
        tensors = {name.removeprefix(f"{case}."): file.get_tensor(name) for name in names}
    meant = tensors.pop("meant")
    tensors.pop("weight_shape", None)
    method = TestIntQuantized().method(config=config(arguments.pop("format"), **arguments))
    assert isinstance(method, CompressedTensors)
    return method, tensors, meant


def real(method: CompressedTensors, tensors: dict[str, Tensor]) -> Tensor:
    """The weight [16, 64] that the layer multiplies with."""
    spec = LinearSpec("m.o", 64, (16,), "float32")
    layer = method.for_layer(spec)
    stored = [(f"m.o.{suffix}", tensor, Path("file")) for suffix, tensor in tensors.items()]
    arrived = {
        name.removeprefix("m.o."): tensor
        for name, tensor, _ in method.decode(stored, "float32", lambda _: False)
    }
    wanted = {name: one.shape for name, one in layer.create(spec).items()}
    assert wanted == {name: tuple(tensor.shape) for name, tensor in arrived.items()}
    return layer.apply(layer.finish(spec, arrived), torch.eye(64)).T


CASES = (
    "w4", "w4-zeros", "w8-zeros", "w3", "w6-zeros", "int8-zeros", "int8-tensor", "int8-group", "nvfp4",
    "mxfp4", "mxfp6", "mxfp8", "fp8-tensor", "fp8-channel", "fp8-block",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_layers(case: str) -> None:
    method, tensors, meant = library(case)
    torch.testing.assert_close(real(method, tensors), meant, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_misread_layers_show(case: str) -> None:
    """Halves of bytes swapped, zero points off by one, scales turned."""
    for name in ("weight_packed", "weight_zero_point", "weight_scale"):
        method, tensors, meant = library(case)
        found = tensors.get(name)
        if found is None or found.numel() == 1:
            continue
        octets = found.contiguous().view(torch.uint8)
        if name == "weight_scale":
            tensors[name] = (
                found.flatten()
                .view(torch.uint8)
                .roll(found.element_size())
                .view(found.dtype)
                .view(found.shape)
            )
        elif name == "weight_zero_point":
            tensors[name] = (octets + 1).view(found.dtype)
        else:
            tensors[name] = ((octets >> 4) | (octets << 4)).view(found.dtype)
        error = (real(method, tensors) - meant).abs().max()
        assert float(error) > 0.005 * float(meant.abs().max()), name


@pytest.mark.parametrize(
    ("key", "value"), [("type", "int"), ("strategy", "channel"), ("dynamic", True), ("num_bits", 4)]
)
def test_schemes_of_the_cache(key: str, value: Any) -> None:
    scheme = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    suite = TestIntQuantized()
    assert suite.method(config={**config("int-quantized"), "kv_cache_scheme": scheme})
    scheme[key] = value
    with pytest.raises(ConfigError, match=rf"kv_cache_scheme\.{key} = {value!r}"):
        suite.method(config={**config("int-quantized"), "kv_cache_scheme": scheme})


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


@pytest.mark.parametrize("groups", [{}, None])
def test_the_cache_alone_may_be_quantized(groups: Any) -> None:
    cache = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor",
        "dynamic": False,
    }
    block = {**config("dense"), "config_groups": groups, "kv_cache_scheme": cache}
    method = TestIntQuantized().method(config=block)
    assert method.for_layer(LinearSpec("m.attn.o", 8, (8,), "float32")).is_plain
