"""Exports of Model Optimizer, built by hand for each of its algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drawn_floats import drawn, exponents
from torch import Tensor

from headrace_core import plugins
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.modelopt import ALGORITHMS, MIXED, ModelOpt
from headrace_reference.quantized import dequantized
from headrace_testing.model.quant_methods import QuantConformance

NAME = "model.layers.0.mlp.gate_up_proj"
FILE = Path("model.safetensors")


def config(algorithm: str, **fields: Any) -> dict[str, Any]:
    """As newer exports have it in config.json."""
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.router*"],
        "producer": {"name": "modelopt", "version": "0.39"}, "kv_cache_scheme": None, **fields,
    }  # fmt: skip


class Export(QuantConformance):
    name = "modelopt"
    ignores = "lm_head"
    in_features = 96
    refused: ClassVar = {
        "quant_algo": "W4A16_AWQ", "ignore": "lm_head", "group_size": 64,
        "kv_cache_scheme": {"num_bits": 8, "type": "int"}, "kv_cache_quant_algo": "NVFP4",
    }  # fmt: skip

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Tensors of the layer as one module."""
        raise NotImplementedError

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, meant = self.parts(spec, weight)
        tensors["input_scale"] = torch.tensor(0.5)
        return self.decoded(spec, tensors), meant

    def decoded(self, spec: LinearSpec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        method = self.method()
        method.for_layer(spec)
        stored = [(f"{spec.name}.{suffix}", t, FILE) for suffix, t in tensors.items()]
        found = method.decode(stored, spec.dtype, lambda _: False)
        return {name.removeprefix(f"{spec.name}."): tensor for name, tensor, _ in found}

    def test_kept_bytes_are_the_files(self) -> None:
        spec = self.spec()
        tensors, _ = self.parts(spec, self.weight(spec))
        kept = self.decoded(spec, dict(tensors))
        sizes = [
            sum(t.numel() * t.element_size() for t in each.values()) for each in (tensors, kept)
        ]
        assert sizes[1] <= 1.15 * sizes[0]


class TestFp8(Export):
    """One scale for the fused layer, which is one module here."""

    config: ClassVar = config("FP8", kv_cache_scheme={"num_bits": 8, "type": "float"})

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        return {"weight": codes, "weight_scale": torch.tensor(0.01)}, numbers * 0.01


class TestFp8Channels(Export):
    fp8_activations = True
    config: ClassVar = config("FP8_PER_CHANNEL_PER_TOKEN")

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        scales = torch.rand(len(weight), generator=torch.Generator().manual_seed(9)) / 100
        return {"weight": codes, "weight_scale": scales}, numbers * scales[:, None]


class TestFp8Blocks(Export):
    """Blocks of 128, which neither rows nor fused parts end with; scales with axes of 1."""

    config: ClassVar = config("fp8_pb_wo")
    in_features, out_parts = 256, (80, 80)

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        scales = torch.rand(2, 1, 2, 1, generator=torch.Generator().manual_seed(9)) / 100
        wide = scales[:, 0, :, 0].repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)
        return {"weight": codes, "weight_scale": scales}, numbers * wide


class TestNvfp4(Export):
    config: ClassVar = {
        "quant_method": "modelopt",
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.3*"],
        },
    }  # fmt: skip
    refused: ClassVar = {
        f"quantization.{key}": value
        for key, value in {
            "quant_algo": "NVFP4_AWQ", "group_size": 32, "kv_cache_quant_algo": "INT8",
            "exclude_modules": "x",
        }.items()
    }  # fmt: skip

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e2m1")
        generator = torch.Generator().manual_seed(9)
        scales = 400 * torch.rand(len(weight), spec.in_features // 16, generator=generator)
        scales = scales.to(torch.float8_e4m3fn)
        outer = torch.tensor(0.0007)
        meant = numbers * scales.float().repeat_interleave(16, 1) * outer
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": outer}, meant

    def test_misread_layers_show(self) -> None:
        spec = self.spec()
        for name in ("weight", "weight_scale"):
            tensors, meant = self.parts(spec, self.weight(spec))
            octets = tensors[name].view(torch.uint8)
            if name == "weight":
                tensors[name] = (octets >> 4) | (octets << 4)
            else:  # transposed
                tensors[name] = octets.T.reshape(octets.shape).view(torch.float8_e4m3fn)
            state = self.method().for_layer(spec).finish(spec, self.decoded(spec, tensors))
            error = (dequantized(state.data[0]) - meant).abs().max()
            assert float(error) > 0.1 * float(meant.abs().max())

    def test_awq_is_not_applied(self) -> None:
        spec = self.spec()
        tensors, _ = self.parts(spec, self.weight(spec))
        with pytest.raises(WeightsError, match=r"gate_up_proj\.pre_quant_scale"):
            self.decoded(spec, {**tensors, "pre_quant_scale": torch.ones(96)})


class TestMxfp8(Export):
    config: ClassVar = config("MXFP8", group_size=32)

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        stored, scales = exponents(len(weight), spec.in_features // 32)
        meant = numbers * scales.repeat_interleave(32, 1)
        return {"weight": codes, "weight_scale": stored}, meant


OPS = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})


def method(block: dict[str, Any]) -> ModelOpt:
    found = TestFp8().method(config=block)
    assert isinstance(found, ModelOpt)
    return found


@pytest.mark.parametrize(
    ("name", "algorithm"), [("modelopt_fp4", "NVFP4"), ("modelopt_mxfp8", "MXFP8")]
)
def test_names_of_its_kinds_read_these_alone(name: str, algorithm: str) -> None:
    kind: type[QuantMethod] = plugins.load("headrace.quantization", name)
    assert kind.name == name
    assert kind.from_config(config(algorithm), OPS).name == name
    for other in {*ALGORITHMS, MIXED} - {algorithm}:
        words = f"quant_algo = '{other}': must be '{algorithm}' with '{name}'; 'modelopt' reads the others"
        with pytest.raises(ConfigError, match=words):
            kind.from_config(config(other), OPS)
    with pytest.raises(ConfigError, match=f"{name!r} needs a checkpoint made with it"):
        kind.from_config(None, OPS)


def test_mixed_precision_is_by_module() -> None:
    layers = {
        "m.q": {"quant_algo": "FP8"}, "m.k": {"quant_algo": "FP8"},
        "m.v": {"quant_algo": "NVFP4", "group_size": 16},
    }  # fmt: skip
    mixed = method(config("MIXED_PRECISION", quantized_layers=layers))
    names = ("m.q", "m.k", "m.v")
    spec = LinearSpec("m.qkv", 64, (64, 32, 32), "float32", part_names=names)
    created = mixed.for_layer(spec).create(spec)
    assert created["weight@0"].dtype == created["weight@1"].dtype == "float8_e4m3fn"
    assert created["weight@2"].dtype == "uint8"
    other = LinearSpec("m.o", 64, (64,), "float32")
    assert mixed.for_layer(other).is_plain


def test_mixed_precision_of_what_is_not_served() -> None:
    layers = {"m.q": {"quant_algo": "W4A8_AWQ"}}
    with pytest.raises(ConfigError, match=r"quantized_layers\['m\.q'\]\.quant_algo = 'W4A8_AWQ'"):
        method(config("MIXED_PRECISION", quantized_layers=layers))
    with pytest.raises(ConfigError, match=r"quantized_layers = \{\}"):
        method(config("MIXED_PRECISION", quantized_layers={}))


def test_while_loading_is_another_name() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint made with it"):
        TestFp8().method(config=None)


def test_unknown_algorithms_are_told_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        method(config("INT7"))
    assert all(repr(name) in str(caught.value) for name in ALGORITHMS)


def test_scales_of_the_cache_are_the_loaders() -> None:
    names = [
        f"m.self_attn.{name}" for name in ("k_proj.k_scale", "v_proj.v_scale", "q_norm.weight")
    ]
    stored = [(name, torch.ones(1), FILE) for name in names]
    kept = method(config("FP8")).decode(stored, "float32", lambda _: False)
    assert [name for name, _, _ in kept] == names


@pytest.mark.parametrize(
    ("name", "is_left"),
    [("lm_head", True), ("a.router", True), ("a.router.x", True), ("lm_heads", False)],
)
def test_wildcards(name: str, is_left: bool) -> None:
    found = method(config("MXFP8")).for_layer(LinearSpec(name, 64, (8,), "float32"))
    assert found.is_plain is is_left


def test_keys_of_newer_exports_are_told(caplog: pytest.LogCaptureFixture) -> None:
    method(config("FP8", producer={"name": "modelopt"}))
    assert not caplog.records
    method(config("FP8", smoothing=0.5))
    assert "smoothing: keys that 'modelopt' is not known to have" in caplog.text
