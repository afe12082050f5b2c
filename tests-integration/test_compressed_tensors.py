"""Checkpoints of llm-compressor in floats of 4, 6 and 8 bits, and in integers with zero points, are
transformers' models with what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from quantized_checkpoints import Dense, FusedModules, Mixture, PackedCheckpoint, fp4
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint


def container(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head", "model.layers.0.self_attn.v_proj"], "kv_cache_scheme": None,
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": activations, "output_activations": None,
            "weights": {"symmetric": True, "dynamic": False, "type": "float", **weights},
        }},
    }  # fmt: skip


class Nvfp4(PackedCheckpoint):
    quantization = container(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "dynamic": "local"},
        num_bits=4,
        strategy="tensor_group",
        group_size=16,
    )

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outer = 448 * 6 / weight.abs().max().reshape(1)
        largest = weight.reshape(len(weight), -1, 16).abs().amax(-1)
        scales = (largest / 6 * outer).to(torch.float8_e4m3fn)
        codes, meant = fp4(weight, scales.float() / outer)
        return {
            "weight_packed": codes, "weight_scale": scales, "weight_global_scale": outer,
            "input_global_scale": torch.ones(1),
        }, meant  # fmt: skip


class TestNvfp4(Dense, Nvfp4):
    """A value of one layer in floats; scales of activations are passed over."""


class TestNvfp4Mixture(Mixture, Nvfp4):
    pass


class TestNvfp4FusedModules(FusedModules, Nvfp4):
    pass


class TestMxfp4(Dense, PackedCheckpoint):
    quantization = container("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.reshape(len(weight), -1, 32).abs().amax(-1)
        exponents = (largest / 6).log2().ceil()
        codes, meant = fp4(weight, exponents.exp2())
        return {"weight_packed": codes, "weight_scale": (exponents + 127).byte()}, meant


class TestMxfp8(Dense, PackedCheckpoint):
    quantization = container("mxfp8-quantized", num_bits=8, strategy="group", group_size=32)

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = (groups.abs().amax(-1) / 448).log2().ceil()
        codes = (groups / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
        meant = (codes.float() * exponents.exp2()[..., None]).view(weight.shape)
        return {"weight": codes.view(weight.shape), "weight_scale": (exponents + 127).byte()}, meant


class TestInt8Zeros(Dense, PackedCheckpoint):
    """W8A16 asymmetric, a scale and a zero point for each output."""

    quantization = container(
        "int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    )

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scales = (most - least) / 255
        zeros = (-128 - least / scales).round()
        codes = (weight / scales + zeros).round().clamp(-128, 127)
        tensors = {"weight": codes, "weight_zero_point": zeros}
        stored = {name: tensor.to(torch.int8) for name, tensor in tensors.items()}
        return {**stored, "weight_scale": scales}, (codes - zeros) * scales


class Int8Inputs(PackedCheckpoint):
    """W8A8 with scales of modules, or of tokens with zero points, beside transformers' model with the same
    rounding in front of its layers.

    A sum in another order may round an activation to the next integer: that bounds the tolerance.
    """

    activations: ClassVar[dict[str, Any]]
    tolerance = 0.12
    least_error = 0.6
    flips_ties = False

    @property
    def quantization(self) -> dict[str, Any]:  # type: ignore[override]
        arguments = {"num_bits": 8, "type": "int", **self.activations}
        return container("int-quantized", arguments, num_bits=8, type="int", strategy="channel")

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round()
        stored = {"weight": codes.to(torch.int8), "weight_scale": scales}
        if not self.activations["dynamic"]:
            stored["input_scale"] = torch.tensor([STATIC_SCALE])
            if not self.activations["symmetric"]:
                stored["input_zero_point"] = torch.tensor([STATIC_ZERO], dtype=torch.int8)
        return stored, codes * scales

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        for name, module in made.reference.named_modules():
            if name.endswith("_proj") and not name.endswith(self.plain):
                module.register_forward_pre_hook(lambda _, inputs: (self.entered(inputs[0]),))
        return made

    def entered(self, x: Tensor) -> Tensor:
        """Activations as they enter a product."""
        scale, zero = torch.tensor(STATIC_SCALE), torch.tensor(0.0)
        if self.activations["dynamic"]:
            low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
            scale = (high - low) / 255
            zero = (-128 - low / scale).round()
        elif not self.activations["symmetric"]:
            zero = torch.tensor(float(STATIC_ZERO))
        return (((x / scale + zero).clamp(-128, 127)).round() - zero) * scale


STATIC_SCALE, STATIC_ZERO = 0.03, 9


class TestInt8Static(Dense, Int8Inputs):
    activations: ClassVar = {"symmetric": True, "strategy": "tensor", "dynamic": False}


class TestInt8StaticZeros(Dense, Int8Inputs):
    activations: ClassVar = {"symmetric": False, "strategy": "tensor", "dynamic": False}


class TestInt8TokenZeros(FusedModules, Int8Inputs):
    """A rank rounds its own share of a token, with a scale of its own."""

    activations: ClassVar = {"symmetric": False, "strategy": "token", "dynamic": True}
    tolerance = 0.4
