"""The ops of :mod:`headrace_core.ops` on the native library.

Each class is one op, bound to the kernels of one instruction set. A call checks what memory safety
needs and nothing else: a decode step makes hundreds of calls, so every microsecond here counts.
Layouts that a kernel cannot read in place are made contiguous first.

:mod:`headrace_kernels.cpu.graph` says how an op must be written so that steps that call it can be
captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.activations import XIELU, Activation, ActivationAndMul, GaussianTopK
from headrace_kernels.cpu.ops.attention import PagedAttention, VarlenAttention
from headrace_kernels.cpu.ops.context import KeyShare, LSECorrection
from headrace_kernels.cpu.ops.elementwise import Add, Clamp, CopyRows, Gate, Mix, Scale, ToFloat32
from headrace_kernels.cpu.ops.embedding import Embedding
from headrace_kernels.cpu.ops.k_quant import RoundKQuant
from headrace_kernels.cpu.ops.linear import HeadLinear, Linear
from headrace_kernels.cpu.ops.low_rank import LowRank
from headrace_kernels.cpu.ops.mla import IndexTokens, MLAAttention, MLACacheWrite
from headrace_kernels.cpu.ops.moe import ExpertLinear, MoE
from headrace_kernels.cpu.ops.norms import AddLayerNorm, AddRMSNorm, LayerNorm, MatchRMS, RMSNorm
from headrace_kernels.cpu.ops.quantized import QuantLinear
from headrace_kernels.cpu.ops.recurrent import (
    MLSTM,
    RGLRU,
    WKV,
    CausalConv,
    DeltaRule,
    GatedRMSNorm,
    SelectiveScan,
    StateSpaceScan,
)
from headrace_kernels.cpu.ops.rotary import CacheWrite, Rotary, RotaryCacheWrite
from headrace_kernels.cpu.ops.routing import RouteExperts
from headrace_kernels.cpu.ops.sampling import Sample, TopLogprobsKernel


class NativeOps(dict[str, Any]):
    """Op name -> implementation, and the library that all of them call."""

    def __init__(self, library: Library, operations: Mapping[str, Any]) -> None:
        super().__init__(operations)
        self.library = library


def native_ops(library: Library) -> NativeOps:
    """Op name -> implementation, all ops. The library must be of no other ops."""
    operations = {
        "embedding": Embedding(library),
        "rms_norm": RMSNorm(library),
        "add_rms_norm": AddRMSNorm(library),
        "layer_norm": LayerNorm(library),
        "add_layer_norm": AddLayerNorm(library),
        "activation": Activation(library),
        "activation_and_mul": ActivationAndMul(library),
        "xielu": XIELU(library),
        "add": Add(library),
        "scale": Scale(library),
        "gate": Gate(library),
        "clamp": Clamp(library),
        "copy_rows": CopyRows(library),
        "mix": Mix(library),
        "match_rms": MatchRMS(library),
        "gaussian_topk": GaussianTopK(library),
        "to_float32": ToFloat32(library),
        "route_experts": RouteExperts(library),
        "rotary": Rotary(library),
        "cache_write": CacheWrite(library),
        "rotary_cache_write": RotaryCacheWrite(library),
        "paged_attention": PagedAttention(library),
        "varlen_attention": VarlenAttention(library),
        "mla_cache_write": MLACacheWrite(library),
        "mla_attention": MLAAttention(library),
        "index_tokens": IndexTokens(library),
        "key_share": KeyShare(library),
        "lse_correction": LSECorrection(library),
        "causal_conv": CausalConv(library),
        "selective_scan": SelectiveScan(library),
        "state_space_scan": StateSpaceScan(library),
        "delta_rule": DeltaRule(library),
        "rg_lru": RGLRU(library),
        "wkv": WKV(library),
        "mlstm": MLSTM(library),
        "gated_rms_norm": GatedRMSNorm(library),
        "linear": Linear(library),
        "head_linear": HeadLinear(library),
        "quant_linear": QuantLinear(library),
        "round_k_quant": RoundKQuant(library),
        "moe": MoE(library),
        "expert_linear": ExpertLinear(library),
        "low_rank": LowRank(library),
        "sample": Sample(library),
        "top_logprobs": TopLogprobsKernel(library),
    }
    return NativeOps(library, operations)
