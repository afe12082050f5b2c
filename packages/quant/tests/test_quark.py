"""Exports of Quark, built by hand for each of its dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from drawn_floats import drawn, exponents
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearSpec
from headrace_quant.quark import Quark
from headrace_testing.model.quant_methods import QuantConformance
from headrace_testing.model.quantized_layers import awq_tensors

FILE = Path("model.safetensors")


def config(
    dtype: str, scheme: str, inputs: Any = None, export: Any = None, **fields: Any
) -> dict[str, Any]:
    weight = {
        "dtype": dtype, "qscheme": scheme, "is_dynamic": False, "ch_axis": 0, "group_size": None,
        "symmetric": True, "round_method": "half_even", "observer_cls": "PerTensorMinMaxObserver",
        "scale_format": None, **fields,
    }  # fmt: skip
    return {
        "quant_method": "quark", "quant_mode": "eager_mode", "algo_config": None, "exclude": ["lm_head"],
        "export": {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized",
                   "min_kv_scale": 0.0, **(export or {})},
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None,
                                "bias": None},
        "layer_quant_config": {}, "layer_type_quant_config": {},
    }  # fmt: skip


class Export(QuantConformance):
    name = "quark"
    ignores = "lm_head"
    in_features = 96
    refused: ClassVar = {
        "global_quant_config.weight.dtype": "int3", "global_quant_config.weight.is_dynamic": True,
        "global_quant_config.weight.qscheme": "per_block", "global_quant_config.bias": {"dtype": "int8"},
        "global_quant_config.output_tensors": {"dtype": "int8"}, "export.weight_format": "fake_quantized",
        "export.pack_method": "other", "layer_type_quant_config": {"Linear": None}, "exclude": "lm_head",
        "algo_config": [{"name": "rotation"}],
    }  # fmt: skip

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        raise NotImplementedError

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        method = self.method()
        method.for_layer(spec)
        tensors, meant = self.parts(spec, weight)
        tensors |= {"input_scale": torch.ones(1), "output_scale": torch.ones(1)}
        stored = [(f"{spec.name}.{suffix}", t, FILE) for suffix, t in tensors.items()]
        found = method.decode(stored, spec.dtype, lambda _: False)
        return {name.removeprefix(f"{spec.name}."): tensor for name, tensor, _ in found}, meant

    def test_what_no_layer_holds_is_left_as_it_is(self) -> None:
        """Patterns mean norms and the embedding, too."""
        method = self.method()
        method.for_layer(LinearSpec("m.o", 96, (16,), "bfloat16"))
        norm = torch.ones(64, dtype=torch.bfloat16)
        stored = [("m.norm.weight", norm, FILE)]
        assert list(method.decode(stored, "bfloat16", lambda _: False)) == stored


class TestFp8(Export):
    config: ClassVar = config("fp8_e4m3", "per_tensor", {"dtype": "fp8_e4m3", "is_dynamic": False})

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        return {"weight": codes, "weight_scale": torch.tensor(0.01)}, numbers * 0.01


class TestFp8Channels(Export):
    config: ClassVar = config("fp8_e4m3", "per_channel")
    refused: ClassVar = {"global_quant_config.weight.ch_axis": 1}

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, "e4m3")
        scales = torch.rand(len(weight), generator=torch.Generator().manual_seed(9)) / 100
        return {"weight": codes, "weight_scale": scales}, numbers * scales[:, None]


class TestInt8(Export):
    config: ClassVar = config(
        "int8", "per_channel", {"dtype": "int8", "qscheme": "per_token", "is_dynamic": True}
    )
    int8_activations = True
    refused: ClassVar = {
        "global_quant_config.weight.symmetric": False,
        "global_quant_config.input_tensors.is_dynamic": False,
        "global_quant_config.input_tensors.qscheme": "per_tensor",
        "global_quant_config.input_tensors.dtype": "fp8_e4m3",
    }

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().amax(1).clamp(min=1e-6) / 127
        codes = (weight / scales[:, None]).round()
        return {
            "weight": codes.to(torch.int8), "weight_scale": scales,
            "weight_zero_point": torch.zeros(len(weight), dtype=torch.int8),
        }, codes * scales[:, None]  # fmt: skip


class TestUint4(Export):
    """The layout of AWQ."""

    config: ClassVar = config("uint4", "per_group", group_size=32, symmetric=False)
    out_parts = (24, 16)
    refused: ClassVar = {
        "global_quant_config.weight.group_size": 4, "global_quant_config.weight.symmetric": True,
    }  # fmt: skip

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, meant = awq_tensors(weight, group_size=32)
        names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
        return {names[key]: tensor for key, tensor in tensors.items()}, meant


class TestInt4InOrder(Export):
    """Codes in two's complement, without zero points, outputs in their own order."""

    config: ClassVar = config("int4", "per_group", group_size=32, export={"pack_method": "order"})
    out_parts = (24, 16)

    @pytest.mark.parametrize(
        ("suffix", "tensor"),
        [
            ("weight", torch.zeros(96, 2)),
            ("weight", torch.zeros(96, 2, dtype=torch.int8)),
            ("weight_scale", torch.ones(2)),
        ],
        ids=["floats", "bytes", "row"],
    )
    def test_what_is_no_word(self, suffix: str, tensor: Tensor) -> None:
        method = self.method()
        method.for_layer(LinearSpec("m.o", 96, (16,), "float32"))
        stored = [(f"m.o.{suffix}", tensor, FILE)]
        with pytest.raises(WeightsError, match=rf"'m\.o\.{suffix}' is (float32|int8) \["):
            list(method.decode(stored, "float32", lambda _: False))

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.view(len(weight), -1, 32)
        scales = (groups.abs().amax(-1) / 7).clamp(min=1e-6)
        codes = (groups / scales[..., None]).round().view(weight.shape)
        nibbles = (codes.long() % 16).T.reshape(weight.shape[1], -1, 8)
        words = (nibbles << 4 * torch.arange(8)).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        meant = codes * scales.repeat_interleave(32, 1)
        return {"weight": words, "weight_scale": scales.T.contiguous()}, meant


class Mx(Export):
    element: ClassVar[str]

    def parts(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, numbers = drawn(weight, self.element)
        stored, scales = exponents(len(weight), spec.in_features // 32)
        return {"weight": codes, "weight_scale": stored}, numbers * scales.repeat_interleave(32, 1)


class TestMxfp4(Mx):
    element = "e2m1"
    config: ClassVar = config(
        "fp4", "per_group", {"dtype": "fp4", "is_dynamic": True}, group_size=32, scale_format="e8m0"
    )
    refused: ClassVar = {
        "global_quant_config.weight.group_size": 16,
        "global_quant_config.weight.scale_format": "e4m3",
        "global_quant_config.weight.qscheme": "per_tensor",
        "global_quant_config.input_tensors.dtype": "int8",
    }


class TestMxfp6E2M3(Mx):
    element = "e2m3"
    config: ClassVar = config("fp6_e2m3", "per_group", group_size=32, scale_format="e8m0")


class TestMxfp6E3M2(Mx):
    element = "e3m2"
    config: ClassVar = config("fp6_e3m2", "per_group", group_size=32, scale_format="e8m0")


def mixed() -> Quark:
    """MXFP4, FP8 in the layers of attention, and floats."""
    block = config("fp4", "per_group", group_size=32, scale_format="e8m0")
    fp8 = config("fp8_e4m3", "per_tensor")["global_quant_config"]
    block["layer_quant_config"] = {"*self_attn*": fp8, "*router": {"weight": None}}
    block["exclude"] = ["lm_head", "re:.*[.]5[.].*", "*.gate"]
    found = TestFp8().method(config=block)
    assert isinstance(found, Quark)
    return found


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("m.4.mlp.up_proj", "uint8"),
        ("m.4.self_attn.o_proj", "float8_e4m3fn"),
        ("m.5.mlp.up_proj", None),
        ("m.4.mlp.gate", None),
        ("m.4.mlp.router", None),
    ],
)
def test_mixed_files(name: str, dtype: str | None) -> None:
    spec = LinearSpec(name, 64, (8,), "float32")
    assert mixed().for_layer(spec).create(spec)["weight"].dtype == dtype


def test_zero_points_of_symmetric_weights_must_be_zero() -> None:
    method = TestInt8().method()
    stored = [("m.o.weight_zero_point", torch.ones(4, dtype=torch.int8), FILE)]
    with pytest.raises(WeightsError, match=r"m\.o\.weight_zero_point.*symmetric"):
        list(method.decode(stored, "float32", lambda _: False))


def test_it_needs_a_checkpoint() -> None:
    with pytest.raises(ConfigError, match="needs a checkpoint made with it"):
        TestFp8().method(config=None)


def test_keys_of_newer_exports_are_told(caplog: pytest.LogCaptureFixture) -> None:
    known = config("fp8_e4m3", "per_tensor")
    TestFp8().method(config=known)
    assert not caplog.records
    TestFp8().method(config={**known, "smoothing": 0.5})
    assert "smoothing: keys that 'quark' is not known to have" in caplog.text
