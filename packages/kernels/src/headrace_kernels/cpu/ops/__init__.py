"""The ops of :mod:`headrace_core.ops` on the native library.

Each class is one op, bound to the kernels of one instruction set. A call checks what memory safety
needs and nothing else: a decode step makes hundreds of calls, so every microsecond here counts.
Layouts that a kernel cannot read in place are made contiguous first.
"""

from __future__ import annotations

from typing import Any

from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.activations import Activation, ActivationAndMul
from headrace_kernels.cpu.ops.attention import PagedAttention
from headrace_kernels.cpu.ops.embedding import Embedding
from headrace_kernels.cpu.ops.linear import Linear
from headrace_kernels.cpu.ops.moe import MoE
from headrace_kernels.cpu.ops.norms import AddRMSNorm, LayerNorm, RMSNorm
from headrace_kernels.cpu.ops.quantized import QuantLinear
from headrace_kernels.cpu.ops.rotary import CacheWrite, Rotary, RotaryCacheWrite


def native_ops(library: Library) -> dict[str, Any]:
    """Op name -> implementation, all ops."""
    return {
        "embedding": Embedding(library),
        "rms_norm": RMSNorm(library),
        "add_rms_norm": AddRMSNorm(library),
        "layer_norm": LayerNorm(library),
        "activation": Activation(library),
        "activation_and_mul": ActivationAndMul(library),
        "rotary": Rotary(library),
        "cache_write": CacheWrite(library),
        "rotary_cache_write": RotaryCacheWrite(library),
        "paged_attention": PagedAttention(library),
        "linear": Linear(library),
        "quant_linear": QuantLinear(library),
        "moe": MoE(library),
    }
