"""Which whole models show that a quantization method computes what transformers does: the table of format by
property that :mod:`test_quantized_formats` holds against the methods that are installed.

Every suite here inherits :class:`headrace_testing.model.decoders.ModelConformance`: one request, batches,
chunks, preemption, two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import stored_variants as variants
import test_bitsandbytes as bitsandbytes
import test_compressed_tensors as compressed
import test_fp8 as fp8
import test_gguf_packed as gguf
import test_integer_checkpoints as integers
import test_modelopt as modelopt
import test_quark_torchao as quark_torchao
import test_rounded_models as rounded
from quantized_checkpoints import Dense, IntegerConformance
from torch import Tensor

from headrace_testing.model.decoders import ModelConformance


class PlainModel(Dense, IntegerConformance):
    """Floats: nothing is packed."""

    quantization = {}  # noqa: RUF012
    adds_tensors = False

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        return {"weight": weight}, weight


@dataclass(frozen=True)
class Proof:
    """Suites of one method; a text is the reason why there is none."""

    models: tuple[type[ModelConformance], ...]
    """Without experts. The first also runs through the whole engine."""
    mixture: type[ModelConformance] | str
    """In a mixture of experts."""
    parts: type[ModelConformance] | str
    """Query, key and value, or gate and up, are stored in different ways, or in one module."""
    misread: tuple[type[ModelConformance], ...] | str
    """With nibbles in another order, zero points that are off by one, or scales that are transposed."""
    schemes: tuple[type[ModelConformance], ...] = ()
    """Further ways of storing."""
    one_rank: str = ""
    """Words that refuse more ranks for every model; empty: two ranks are as one."""

    def suites(self) -> Iterator[type[ModelConformance]]:
        """All of them."""
        yield from self.models
        yield from self.schemes
        yield from (s for s in (self.mixture, self.parts) if not isinstance(s, str))


NOTHING_STORED = (
    "floats are stored, so there is nothing to misread; rounding is held against a bound"
)
ONE_METHOD = "all layers are rounded alike; overrides for single layers name whole fused layers"
CT, V = compressed, variants


def while_loading(name: str) -> Proof:
    """Of a method that rounds floats."""
    return Proof((rounded.SUITES[name],), rounded.mixture_suite(name), ONE_METHOD, NOTHING_STORED)


PROOFS: dict[str, Proof] = {
    "auto-round": Proof(
        (integers.TestAutoRound,), V.AutoRoundMixture, V.AutoRoundMixedParts, (integers.TestAutoRound,),
        schemes=(V.AutoRoundAWQ, V.AutoRoundConv1D),
    ),
    "awq": Proof(
        (V.AWQMixedParts, integers.TestAWQ), integers.TestAWQMixture, V.AWQMixedParts, (integers.TestAWQ,),
        schemes=(V.AWQConv1D,),
    ),
    "bitnet": Proof(
        (V.BitNet,), "no architecture of BitNet has experts", V.BitNetParts, (V.BitNet,),
        schemes=(V.BitNetWhileLoading,), one_rank="tensor_parallel_size = 2",
    ),
    "bitsandbytes": Proof(
        (bitsandbytes.TestNF4, bitsandbytes.TestInt8), bitsandbytes.TestNF4Mixture, V.Int8Parts,
        (bitsandbytes.TestNF4, bitsandbytes.TestNF4Twice, bitsandbytes.TestInt8, V.FP4),
        schemes=(bitsandbytes.TestNF4Twice, V.FP4, bitsandbytes.TestNF4Conv1D,
                 bitsandbytes.TestInt8Mixture),
    ),
    "compressed-tensors": Proof(
        (V.W4A16Zeros, V.W4A16, V.W8A16Channels), V.W4A16Mixture, V.W4A16FusedModules,
        (V.W4A16Zeros, CT.TestInt8Zeros, CT.TestNvfp4, CT.TestMxfp4, CT.TestMxfp8, V.Mxfp6, V.NaiveFp8),
        schemes=(V.W4A16Sorted, V.W4A16Experts, V.W4A16Head, CT.TestInt8Zeros, V.Int8Mixture,
                 V.Int8FusedModules, CT.TestInt8Static,
                 CT.TestInt8TokenZeros, CT.TestNvfp4, CT.TestNvfp4Mixture, CT.TestMxfp4, V.Mxfp4Mixture,
                 V.Mxfp6, V.Mxfp6Mixture, CT.TestMxfp8, V.Mxfp8Mixture, V.NaiveFp8, V.FloatQuantizedMixture,
                 V.CompressedConv1D, V.CompressedFp8Conv1D),
    ),
    "experts_int8": Proof(
        (), rounded.mixture_suite("experts_int8"), "other layers than experts stay in floats", NOTHING_STORED
    ),
    "fp4": while_loading("fp4"),
    "fp8": Proof(
        (fp8.TestQwen3Packed, rounded.SUITES["fp8"]), fp8.TestQwen3MoePacked, fp8.TestQwen3Packed,
        "codes of a byte have no halves; test_scales_of_other_blocks_show turns scales",
        schemes=(fp8.TestQwen3, fp8.TestQwen3OneScale, fp8.TestDeepseekV3, V.Fp8BlocksConv1D),
    ),
    "gguf": Proof(
        (gguf.TestMixtureOf4And6Bits, gguf.TestBlocksOf32), gguf.TestExperts, gguf.TestOtherBlocksOf256,
        (gguf.TestBlocksOf32, gguf.TestMixtureOf4And6Bits),
        schemes=(gguf.TestTernaryAndFloatBlocks, gguf.TestVectors, gguf.TestVectorsOfOneType,
                 gguf.TestExpertsOfVectors),
    ),
    "gptq": Proof(
        (integers.TestGPTQMixedParts, integers.TestGPTQ), integers.TestGPTQMixture,
        integers.TestGPTQMixedParts, (integers.TestGPTQ, integers.TestGPTQSorted, integers.TestGPTQConv1D),
        schemes=(integers.TestGPTQOfThreeBits, integers.TestGPTQSorted, V.GPTQOf2Bits, V.GPTQOf8Bits,
                 V.GPTQv2, V.GPTQHead, integers.TestGPTQConv1D),
    ),
    "int4": while_loading("int4"),
    "int4_g32": while_loading("int4_g32"),
    "int8": Proof(
        (rounded.TestInt8,), rounded.mixture_suite("int8"), V.OwnInt8Activations, NOTHING_STORED,
    ),
    "int8_weight_only": Proof(
        (V.OwnInt8Dense, rounded.SUITES["int8_weight_only"]), V.OwnInt8Mixture, V.OwnInt8Parts,
        (V.OwnInt8Dense,),
    ),
    "modelopt": Proof(
        (V.ModelOptMixed, modelopt.TestNvfp4), modelopt.TestNvfp4Mixture, V.ModelOptMixed,
        (modelopt.TestNvfp4, modelopt.TestFp8Blocks),
        schemes=(modelopt.TestNvfp4FusedModules, modelopt.TestFp8, modelopt.TestFp8FusedModules,
                 modelopt.TestFp8Mixture, modelopt.TestFp8Blocks, V.ModelOptBlocksMixture, V.ModelOptChannels,
                 V.ModelOptMxfp8, V.ModelOptConv1D),
    ),
    "modelopt_fp4": Proof(
        (V.ModelOptFp4,), V.ModelOptFp4Mixture, modelopt.TestNvfp4FusedModules, (modelopt.TestNvfp4,)
    ),
    "modelopt_mxfp8": Proof(
        (V.ModelOptMxfp8,), V.ModelOptMxfp8Mixture, V.ModelOptMixed, (V.ModelOptMxfp8,)
    ),
    "mxfp4": Proof(
        (rounded.SUITES["mxfp4"],), V.GptOss, "only experts are stored so, all of a layer in one tensor",
        (V.GptOss,),
    ),
    "nf4": while_loading("nf4"),
    "none": Proof(
        (PlainModel,), "tested for every family of experts, in headrace-models", "floats are floats",
        "floats have no parts",
    ),
    "q4_0": while_loading("q4_0"),
    "q4_k": while_loading("q4_k"),
    "q5_k": while_loading("q5_k"),
    "q6_k": while_loading("q6_k"),
    "q8_0": while_loading("q8_0"),
    "quark": Proof(
        (V.QuarkMixedParts, quark_torchao.TestQuark), quark_torchao.TestQuarkMixture, V.QuarkMixedParts,
        (quark_torchao.TestQuark, V.QuarkUint4, V.QuarkE2M3),
        schemes=(V.QuarkE2M3, V.QuarkE3M2, V.QuarkInt8, V.QuarkUint4, V.QuarkInt4, V.QuarkChannels,
                 V.QuarkConv1D),
    ),
    "torchao": Proof(
        (quark_torchao.TestTorchAO, V.TorchAOInt4), V.TorchAOMixture, quark_torchao.TestTorchAO,
        (quark_torchao.TestTorchAO, quark_torchao.TestTorchAOFp8, V.TorchAOInt4),
        schemes=(quark_torchao.TestTorchAOFp8, V.TorchAOFp8Mixture, V.TorchAOFp8Activations, V.TorchAOInt8,
                 V.TorchAOInt8Activations, V.TorchAOConv1D),
    ),
}  # fmt: skip
"""By the name of an entry point; other names of the same class are in :data:`ALIASES`."""
ALIASES = {
    "awq_marlin": "awq", "bitblas": "gptq", "gptq_bitblas": "gptq", "gptq_marlin": "gptq",
    "inc": "auto-round", "intel/auto-round": "auto-round", "moe_wna16": "gptq",
}  # fmt: skip
REFUSED = ("deepspeedfp",)
"""Names that are known and refused."""


def method_of(suite: type[ModelConformance]) -> tuple[str, bool]:
    """The method that a suite's models are loaded with, and whether weights are stored in its format."""
    made: Any = suite()
    if isinstance(made, rounded.RoundedConformance):
        return made.method, False
    if isinstance(made, gguf.GGUFConformance):
        return "gguf", True
    block = made.block_of_config() if isinstance(made, fp8.Fp8Conformance) else made.quantization
    return block.get("quant_method", "none"), True
