"""Checkpoints of the ways of storing that formats have beside those with test files of their own, and models
that these lack: mixtures of experts, fused layers of differing types, weights that are stored transposed."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from quantized_checkpoints import (
    Conv1D,
    Dense,
    FusedModules,
    IntegerConformance,
    Mixture,
    PackedCheckpoint,
    fp4,
)
from safetensors.torch import load_file, save_file
from test_bitsandbytes import Int8Checkpoint, NF4Checkpoint, four_bits
from test_compressed_tensors import TestInt8Zeros as Int8Zeros
from test_compressed_tensors import TestMxfp4 as Mxfp4
from test_compressed_tensors import TestMxfp8 as Mxfp8
from test_compressed_tensors import container
from test_integer_checkpoints import AWQCheckpoint, GPTQCheckpoint, gptq
from test_modelopt import Nvfp4 as ModelOptNvfp4
from test_modelopt import TestFp8 as ModelOptFp8
from test_modelopt import TestFp8Blocks as ModelOptBlocks
from test_modelopt import TestNvfp4 as ModelOptDense
from test_modelopt import export
from test_quark_torchao import Quark, torchao
from test_quark_torchao import TestTorchAO as TorchAOIntx
from test_quark_torchao import TestTorchAOFp8 as TorchAOFp8
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint, ModelConformance
from headrace_testing.model.quantized_layers import (
    awq_tensors,
    gptq_tensors,
    rounded_groups,
    words,
)

PLAIN = "0.self_attn.v_proj"
Made = tuple[dict[str, Tensor], Tensor]


def by_groups(weight: Tensor, bits: int, size: int, *, symmetric: bool) -> tuple[Tensor, ...]:
    """weight [N, K] -> codes [N, K], zero points [N, G], scales [N, G] float16, and what they mean."""
    g_idx = torch.arange(weight.shape[1]) // size
    q, z, scales = rounded_groups(weight, bits, size, symmetric=symmetric, g_idx=g_idx)
    return q, z, scales, (q - z[:, g_idx]).float() * scales.float()[:, g_idx]


def e4m3(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and what they mean with ``scales`` of any shape that broadcasts."""
    codes = (weight / scales).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales


def powers(weight: Tensor, top: float) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> groups [N, G, 32], and the exponent of each [N, G] that brings it below ``top``."""
    groups = weight.reshape(len(weight), -1, 32)
    return groups, (groups.abs().amax(-1) / top).log2().ceil()


def small_floats(exponent_bits: int, mantissa_bits: int, bias: int) -> Tensor:
    """The numbers of a float without infinities, by code: sign, exponent, mantissa."""
    found = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        lead = 1.0 if exponent else 0.0
        size = (lead + mantissa / (1 << mantissa_bits)) * 2.0 ** (max(exponent, 1) - bias)
        found.append(size)
    return torch.tensor([*found, *(-size for size in found)])


SIX_BITS = {"e2m3": small_floats(2, 3, 1), "e3m2": small_floats(3, 2, 3)}


def mx6(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> codes uint8 [N, K * 3 / 4], exponents uint8 [N, K / 32], and what they mean."""
    book = SIX_BITS[kind]
    groups, exponents = powers(weight, float(book.max()))
    codes = ((groups / exponents.exp2()[..., None])[..., None] - book).abs().argmin(-1)
    meant = (book[codes] * exponents.exp2()[..., None]).view(weight.shape)
    octets = words(codes.view(weight.shape), 6).view(torch.uint8)
    return octets, (exponents + 127).byte(), meant


def round_inputs(made: Checkpoint, besides: str = "-") -> None:
    """Have transformers' layers round each token to 255 equal steps of its largest magnitude."""

    def entered(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        step = inputs[0].abs().amax(-1, keepdim=True) / 127
        return ((inputs[0] / step).round() * step,)

    for name, module in made.reference.named_modules():
        if name.endswith("_proj") and not name.endswith(besides):
            module.register_forward_pre_hook(entered)


# ---- gptq, awq, auto-round


class GPTQOf2Bits(Dense, GPTQCheckpoint):
    bits = 2
    symmetric = False
    quantization = gptq(bits=2, sym=False)


class GPTQOf8Bits(Mixture, GPTQCheckpoint):
    bits = 8
    quantization = gptq(bits=8)


class GPTQv2(Dense, GPTQCheckpoint):
    """Zero points as they are."""

    quantization = gptq(checkpoint_format="gptq_v2", sym=False)

    def module(self, name: str, weight: Tensor) -> Made:
        bits = 8 if name.endswith("down_proj") else 4
        return gptq_tensors(weight, bits=bits, group_size=32, symmetric=False, less_one=False)


class GPTQHead(Dense, GPTQCheckpoint):
    """The head is packed as well."""

    layers = r"(.*_proj|lm_head)"
    quantization = gptq(lm_head=True)


class AWQMixedParts(Dense, AWQCheckpoint):
    """A value in floats beside a query and a key in 4 bits, and a gate beside an up."""

    floats: ClassVar = ("0.self_attn.v_proj", "1.mlp.gate_proj")
    quantization: ClassVar = {**AWQCheckpoint.quantization, "modules_to_not_convert": list(floats)}

    def module(self, name: str, weight: Tensor) -> Made:
        if name.endswith(self.floats):
            return {"weight": weight}, weight
        return awq_tensors(weight, group_size=32)


class AWQConv1D(Conv1D, AWQCheckpoint):
    quantization: ClassVar = {
        **AWQCheckpoint.quantization,
        "modules_to_not_convert": ["0.attn.c_proj"],
    }

    def module(self, name: str, weight: Tensor) -> Made:
        if name.endswith("0.attn.c_proj"):
            return {"weight": weight}, weight
        return awq_tensors(weight, group_size=32)


def auto_round(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "extra_config": {".*down_proj": {"bits": 8}}, **fields,
    }  # fmt: skip


class AutoRoundMixture(Mixture, GPTQCheckpoint):
    quantization = auto_round()


class AutoRoundMixedParts(Dense, GPTQCheckpoint):
    plain = (PLAIN,)
    eight = ("1.mlp.gate_proj",)
    quantization = auto_round(
        extra_config={
            f"model.layers.{PLAIN}": {"bits": 16},
            "model.layers.1.mlp.gate_proj": {"bits": 8},
        }
    )


class AutoRoundAWQ(Dense, AWQCheckpoint):
    quantization = auto_round(
        packing_format="auto_round:auto_awq", sym=False,
        extra_config={"model.layers.1.self_attn.o_proj": {"bits": 16}},
    )  # fmt: skip


class AutoRoundConv1D(Conv1D, GPTQCheckpoint):
    eight = ("mlp.c_proj",)
    quantization = auto_round(extra_config={".*mlp.c_proj": {"bits": 8}})


# ---- compressed-tensors


class Words(PackedCheckpoint):
    """W4A16 and its kin: codes along the inputs, zero points along the outputs, in words of 32 bits."""

    bits: ClassVar[int] = 4
    symmetric: ClassVar[bool] = True
    group: ClassVar[int | None] = 32
    quantization = container(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32
    )

    def packed(self, weight: Tensor) -> Made:
        q, z, scales, meant = by_groups(
            weight, self.bits, self.group or weight.shape[1], symmetric=self.symmetric
        )
        tensors = {
            "weight_packed": words(q, self.bits), "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not self.symmetric:
            tensors["weight_zero_point"] = words(z.T, self.bits).T.contiguous()
        return tensors, meant


class W4A16(Dense, Words):
    pass


class W4A16Mixture(Mixture, Words):
    pass


class W4A16Experts(Mixture, Words):
    """Experts that are stored in different ways: one in floats, and of another the gate."""

    floats: ClassVar = (
        "model.layers.0.mlp.experts.1", "model.layers.0.mlp.experts.2.gate_proj", f"model.layers.{PLAIN}",
    )  # fmt: skip
    quantization: ClassVar = {**Words.quantization, "ignore": ["lm_head", *floats]}

    def module(self, name: str, weight: Tensor) -> Made:
        plain = f"{name}.".startswith(tuple(f"{each}." for each in self.floats))
        return ({"weight": weight}, weight) if plain else self.packed(weight)


class W4A16Head(Dense, Words):
    layers = r"(.*_proj|lm_head)"
    quantization: ClassVar = {**Words.quantization, "ignore": [f"model.layers.{PLAIN}"]}


class W4A16FusedModules(FusedModules, Words):
    pass


class W4A16Zeros(Dense, Words):
    symmetric = False
    quantization = container(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    )


class W8A16Channels(Dense, Words):
    bits = 8
    group = None
    quantization = container("pack-quantized", num_bits=8, type="int", strategy="channel")


class W4A16Sorted(Dense, Words):
    """``actorder`` ``group``: inputs belong to groups in no order, so a rank's belong to any."""

    tensor_parallel = 1
    refusal = "tensor_parallel_size = 2"
    quantization = container(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="group"
    )

    def packed(self, weight: Tensor) -> Made:
        g_idx = torch.arange(weight.shape[1]) // 32
        g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(3))]
        q, z, scales = rounded_groups(weight, 4, 32, symmetric=True, g_idx=g_idx)
        meant = (q - z[:, g_idx]).float() * scales.float()[:, g_idx]
        return {
            "weight_packed": words(q, 4), "weight_scale": scales, "weight_g_idx": g_idx.int(),
            "weight_shape": torch.tensor(weight.shape),
        }, meant  # fmt: skip


class Int8Mixture(Mixture, Int8Zeros):
    pass


class Int8FusedModules(FusedModules, Int8Zeros):
    pass


class Mxfp4Mixture(Mixture, Mxfp4):
    pass


class Mxfp8Mixture(Mixture, Mxfp8):
    pass


class Mxfp6(Dense, PackedCheckpoint):
    quantization = container("mxfp6-pack-quantized", num_bits=6, strategy="group", group_size=32)

    def packed(self, weight: Tensor) -> Made:
        codes, scales, meant = mx6(weight, "e2m3")
        return {"weight_packed": codes, "weight_scale": scales}, meant


class Mxfp6Mixture(Mixture, Mxfp6):
    pass


class NaiveFp8(Dense, PackedCheckpoint):
    """A scale for each output; the value of one layer in floats."""

    quantization = container("naive-quantized", num_bits=8, strategy="channel")

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes, meant = e4m3(weight, scales)
        return {"weight": codes, "weight_scale": scales}, meant


class FloatQuantizedMixture(Mixture, NaiveFp8):
    quantization = container("float-quantized", num_bits=8, strategy="channel")


class CompressedConv1D(Conv1D, Words):
    plain = "0.attn.c_proj"
    quantization: ClassVar = {
        **Words.quantization, "ignore": ["lm_head", "transformer.h.0.attn.c_proj"],
    }  # fmt: skip


class CompressedFp8Conv1D(Conv1D, NaiveFp8):
    """Stays packed."""

    plain = "0.attn.c_proj"
    quantization: ClassVar = {
        **NaiveFp8.quantization, "ignore": ["lm_head", "transformer.h.0.attn.c_proj"],
    }  # fmt: skip


class Fp8BlocksConv1D(Conv1D, PackedCheckpoint):
    """Blocks of 16, which have too many scales to stay packed, as a linear layer stores them: [out, in]."""

    plain = "0.mlp.c_proj"
    quantization: ClassVar = {
        "quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head", "transformer.h.0.mlp.c_proj"],
    }  # fmt: skip

    def packed(self, weight: Tensor) -> Made:
        rows, inputs = (size // 16 for size in weight.shape)
        scales = weight.view(rows, 16, inputs, 16).abs().amax((1, 3)) / 448
        codes, meant = e4m3(weight, scales.repeat_interleave(16, 0).repeat_interleave(16, 1))
        return {"weight": codes, "weight_scale_inv": scales}, meant


# ---- bitsandbytes


class FP4(Dense, NF4Checkpoint):
    quantization: ClassVar = {**NF4Checkpoint.quantization, "bnb_4bit_quant_type": "fp4"}

    def module(self, name: str, weight: Tensor) -> Made:
        if name.endswith(self.plain):
            return {"weight": weight}, weight
        return four_bits(weight, twice=False, kind="fp4")


class Int8Parts(Dense, Int8Checkpoint):
    """A value in floats."""

    quantization: ClassVar = {
        **Int8Checkpoint.quantization, "llm_int8_skip_modules": ["lm_head", f"model.layers.{PLAIN}"],
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> Made:
        plain = name.endswith(PLAIN)
        return ({"weight": weight}, weight) if plain else super().module(name, weight)


# ---- modelopt


class ModelOptChannels(Dense, PackedCheckpoint):
    quantization = export("FP8_PER_CHANNEL_PER_TOKEN")

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1) / 448
        codes, meant = e4m3(weight, scales[:, None])
        return {"weight": codes, "weight_scale": scales}, meant


class ModelOptMxfp8(Dense, PackedCheckpoint):
    quantization: ClassVar = {**export("MXFP8"), "quant_method": "modelopt_mxfp8"}

    def packed(self, weight: Tensor) -> Made:
        groups, exponents = powers(weight, 448)
        codes, meant = e4m3(groups, exponents.exp2()[..., None])
        tensors = {"weight": codes.view(weight.shape), "weight_scale": (exponents + 127).byte()}
        return tensors, meant.reshape(weight.shape)


class ModelOptMxfp8Mixture(Mixture, ModelOptMxfp8):
    pass


class ModelOptFp4(Dense, ModelOptNvfp4):
    quantization: ClassVar = {**ModelOptNvfp4.quantization, "quant_method": "modelopt_fp4"}


class ModelOptFp4Mixture(Mixture, ModelOptNvfp4):
    quantization: ClassVar = {**ModelOptNvfp4.quantization, "quant_method": "modelopt_fp4"}


class ModelOptBlocksMixture(Mixture, ModelOptBlocks):
    pass


class ModelOptMixed(Dense, PackedCheckpoint):
    """``MIXED_PRECISION``: queries in NVFP4, keys in FP8, values in floats, gates in MXFP8."""

    @property
    def quantization(self) -> dict[str, Any]:  # type: ignore[override]
        layers = {}
        for layer in range(2):
            prefix = f"model.layers.{layer}."
            layers |= {
                prefix + "self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16},
                prefix + "self_attn.k_proj": {"quant_algo": "FP8"},
                prefix + "self_attn.o_proj": {"quant_algo": "NVFP4", "group_size": 16},
                prefix + "mlp.gate_proj": {"quant_algo": "MXFP8"},
                prefix + "mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
                prefix + "mlp.down_proj": {"quant_algo": "MXFP8"},
            }
        return export("MIXED_PRECISION", quantized_layers=layers)

    def module(self, name: str, weight: Tensor) -> Made:
        kind = name.rpartition(".")[2]
        if kind == "v_proj":
            return {"weight": weight}, weight
        if kind == "k_proj":
            return ModelOptFp8().packed(weight)
        if kind in ("gate_proj", "down_proj"):
            return ModelOptMxfp8().packed(weight)
        return ModelOptDense().packed(weight)


class ModelOptConv1D(Conv1D, ModelOptNvfp4):
    plain = "0.attn.c_proj"
    quantization = export("NVFP4", group_size=16, ignore=["lm_head", "transformer.h.0.attn.c_proj"])


# ---- quark


def quark(weight: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        **Quark.quantization, "layer_quant_config": {},
        "global_quant_config": {"weight": weight}, **fields,
    }  # fmt: skip


class QuarkVariant(PackedCheckpoint):
    pass


class QuarkE2M3(Dense, QuarkVariant):
    quantization = quark(
        {"dtype": "fp6_e2m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    )

    def packed(self, weight: Tensor) -> Made:
        codes, scales, meant = mx6(weight, "e2m3")
        return {"weight": codes, "weight_scale": scales}, meant


class QuarkE3M2(Mixture, QuarkVariant):
    quantization = quark(
        {"dtype": "fp6_e3m2", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
    )

    def packed(self, weight: Tensor) -> Made:
        codes, scales, meant = mx6(weight, "e3m2")
        return {"weight": codes, "weight_scale": scales}, meant


class QuarkInt8(Dense, QuarkVariant):
    quantization = quark({"dtype": "int8", "qscheme": "per_channel", "symmetric": True})

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1) / 127
        codes = (weight / scales[:, None]).round()
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales[:, None]


class QuarkUint4(Dense, QuarkVariant):
    quantization = quark(
        {"dtype": "uint4", "qscheme": "per_group", "group_size": 32, "symmetric": False}
    )

    def packed(self, weight: Tensor) -> Made:
        tensors, meant = awq_tensors(weight, group_size=32)
        names = {"qweight": "weight", "qzeros": "weight_zero_point", "scales": "weight_scale"}
        return {names[key]: tensor for key, tensor in tensors.items()}, meant


class QuarkInt4(Dense, QuarkVariant):
    """Codes in two's complement without zero points, outputs in their own order."""

    quantization = quark(
        {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True},
        export={"pack_method": "order", "weight_format": "real_quantized"},
    )

    def packed(self, weight: Tensor) -> Made:
        q, _, scales, meant = by_groups(weight, 4, 32, symmetric=True)
        codes = words(((q - 8) & 15).T.contiguous(), 4)
        return {"weight": codes, "weight_scale": scales.T.contiguous()}, meant


class QuarkChannels(Mixture, QuarkVariant):
    quantization = quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"})

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1) / 448
        codes, meant = e4m3(weight, scales[:, None])
        return {"weight": codes, "weight_scale": scales}, meant


class QuarkMixedParts(Dense, Quark):
    """A value in floats; FP8 keys beside queries in MXFP4."""

    quantization: ClassVar = {
        **Quark.quantization,
        "layer_quant_config": dict.fromkeys(
            ("*o_proj", "*k_proj"), Quark.quantization["layer_quant_config"]["*o_proj"]
        ),
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> Made:
        name = name.replace("k_proj", "o_proj")
        return super().module(name, weight)


class QuarkConv1D(Conv1D, Quark):
    plain = "0.attn.c_proj"
    quantization: ClassVar = {
        **Quark.quantization, "exclude": ["lm_head", "transformer.h.0.attn.c_proj"],
    }  # fmt: skip


# ---- torchao


class TorchAOInt8(Dense, PackedCheckpoint):
    scales = "_weight_scale"
    quantization = torchao("Int8WeightOnlyConfig")

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round()
        stored = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales}
        return stored, codes * scales


class TorchAOInt8Activations(Dense, PackedCheckpoint):
    """transformers' model rounds activations in front of its layers, too, which bounds the tolerance; a rank
    rounds its own share of a token."""

    scales = "_weight_scale"
    tolerance = 0.3
    quantization = torchao("Int8DynamicActivationInt8WeightConfig")

    def packed(self, weight: Tensor) -> Made:
        return TorchAOInt8().packed(weight)

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        round_inputs(made, besides=self.plain)
        return made


class TorchAOFp8Activations(Dense, PackedCheckpoint):
    """Activations stay floats on a CPU."""

    scales = "_weight_scale"
    quantization = torchao(
        "Float8DynamicActivationFloat8WeightConfig",
        granularity=[{"_type": "PerTensor", "_data": {}}, {"_type": "PerTensor", "_data": {}}],
    )

    def packed(self, weight: Tensor) -> Made:
        scale = weight.abs().max() / 448
        codes, meant = e4m3(weight, scale)
        return {"_weight_qdata": codes, "_weight_scale": scale}, meant


class TorchAOInt4(Dense, PackedCheckpoint):
    """Codes in two's complement, the lower half of a byte first; scales and minimums by group and output."""

    scales = "_weight_scale"
    quantization = torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="plain")

    def packed(self, weight: Tensor) -> Made:
        groups = weight.reshape(len(weight), -1, 32)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = (most - least) / 15
        codes = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, 15) - 8
        zeros = least + 8 * scales
        meant = (codes * scales[..., None] + zeros[..., None]).view(weight.shape)
        nibbles = codes.view(weight.shape).int() & 15
        octets = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).byte()
        tensors = {"_weight_scale": scales.T, "_weight_zero_point": zeros.T}
        return {"_weight_qdata": octets, **{n: t.contiguous() for n, t in tensors.items()}}, meant


class TorchAOMixture(Mixture, TorchAOIntx):
    test_pickled_file: ClassVar[None] = None


class TorchAOFp8Mixture(Mixture, TorchAOFp8):
    pass


class TorchAOConv1D(Conv1D, TorchAOInt8):
    plain = "0.attn.c_proj"
    quantization: ClassVar = {
        "quant_method": "torchao", "modules_to_not_convert": ["lm_head", "transformer.h.0.attn.c_proj"],
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
    }  # fmt: skip


# ---- headrace's own, BitNet, gpt-oss


class OwnInt8(PackedCheckpoint):
    quantization: ClassVar = {
        "quant_method": "int8_weight_only", "ignore": ["lm_head", f"model.layers.{PLAIN}"],
    }  # fmt: skip
    plain = "-"

    def packed(self, weight: Tensor) -> Made:
        scales = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scales).round()
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales


class OwnInt8Dense(Dense, OwnInt8):
    quantization: ClassVar = {"quant_method": "int8_weight_only"}


class OwnInt8Activations(Dense, OwnInt8):
    """transformers' model rounds activations, too: that bounds the tolerance. A rank rounds its own share. A
    value is in floats, which enters as it is."""

    plain = PLAIN
    tolerance = 0.3
    quantization: ClassVar = {**OwnInt8.quantization, "quant_method": "int8"}

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        round_inputs(made, besides=self.plain)
        return made


class OwnInt8Parts(Dense, OwnInt8):
    """A value in floats beside a query and a key in int8."""

    plain = PLAIN


class OwnInt8Mixture(Mixture, OwnInt8):
    quantization: ClassVar = {"quant_method": "int8_weight_only"}


class BitNet(IntegerConformance):
    """Weights of -1, 0 and 1, in 2 bits, beside transformers' model with the same rounding of activations in
    front of its layers, which bounds the tolerance: a sum in another order may round to the next integer."""

    tensor_parallel = 1
    refusal = "tensor_parallel_size = 2"
    tolerance = 0.12
    scales = "weight_scale"
    quantization: ClassVar = {
        "quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline",
    }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import BitNetForCausalLM

        return BitNetForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from quantized_checkpoints import DENSE
        from transformers import BitNetConfig

        return BitNetConfig(**{**DENSE, **overrides})

    def module(self, name: str, weight: Tensor) -> Made:
        mean = weight.abs().mean()
        codes = (weight / mean).round().clamp(-1, 1)
        rows = (codes + 1).byte().chunk(4)
        packed = rows[0] | rows[1] << 2 | rows[2] << 4 | rows[3] << 6
        return {"weight": packed, "weight_scale": 1 / mean.reshape(1)}, codes * mean

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        round_inputs(made)
        return made


class BitNetParts(BitNet):
    """A value in floats, which enters as it is."""

    quantization: ClassVar = {
        **BitNet.quantization, "modules_to_not_convert": [f"model.layers.{PLAIN}"],
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> Made:
        plain = name.endswith(PLAIN)
        return ({"weight": weight}, weight) if plain else super().module(name, weight)

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        module = made.reference.get_submodule(f"model.layers.{PLAIN}")
        module._forward_pre_hooks.clear()
        return made


class BitNetWhileLoading(BitNet):
    """``autobitlinear``, ``online``: the file holds floats."""

    adds_tensors = False
    quantization: ClassVar = {
        "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online",
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> Made:
        return {"weight": weight}, super().module(name, weight)[1]


class GptOss(IntegerConformance):
    """Experts in blocks of MXFP4, which one tensor of a layer holds; all else in floats."""

    flips_ties = False
    scales = "-"
    quantization: ClassVar = {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import GptOssForCausalLM

        return GptOssForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import GptOssConfig

        own = {
            "vocab_size": 160, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
            "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
            "num_experts_per_tok": 2, "sliding_window": 9, "max_position_embeddings": 128,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        return GptOssConfig(**{**own, **overrides})

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        ModelConformance.make_checkpoint(self, folder, seed, **overrides)
        file = folder / "model.safetensors"
        stored, floats = {}, {}
        for name, tensor in load_file(file).items():
            stored[name] = floats[name] = tensor
            if name.endswith("_proj") and tensor.dim() == 3:
                del stored[name]
                blocks, scales, meant = zip(*map(self.blocks, tensor), strict=True)
                stored[f"{name}_blocks"], stored[f"{name}_scales"] = (
                    torch.stack(blocks), torch.stack(scales),
                )  # fmt: skip
                floats[name] = torch.stack(meant)
        save_file(floats, file, metadata={"format": "pt"})
        reference = self.hf_class().from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        save_file(stored, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = self.quantization
        (folder / "config.json").write_text(json.dumps(config))
        return Checkpoint(reference.eval(), folder)

    def blocks(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """weight [K, N] -> codes [N, K / 32, 16], exponents [N, K / 32], meaning [K, N]."""
        groups, exponents = powers(weight.T.contiguous(), 6)
        codes, meant = fp4(weight.T.contiguous(), exponents.exp2())
        shape = (*groups.shape[:2], 16)
        return codes.view(shape), (exponents + 127).byte(), meant.T.contiguous()


VARIANTS: dict[str, type[IntegerConformance]] = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, IntegerConformance)
    and kind.__module__ == __name__ and not inspect.isabstract(kind)
}  # fmt: skip
"""Every class above that has a model."""
