"""The kernel provider ``triton``: what this folder offers, and when.

Installed as an entry point; importing this module imports neither triton nor torch.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from headrace_core.ops import KernelNeed

DTYPES = ("float32", "float16", "bfloat16")


class TritonProvider:
    """Triton implementations on ``cuda``; on ``cpu`` only interpreted, and only if asked for.

    Environment:
        TRITON_INTERPRET: ``1`` = triton's own switch to interpret kernels with numpy; what makes
            ``cpu`` possible. It is hundreds of times slower than the reference, so the priority
            is below the reference's and only ``choose={...: "triton"}`` selects it.
        HEADRACE_BATCH_INVARIANT: ``1`` = attention, experts, adapters and weights use one tile shape,
            attention never splits the context and weights never split their inputs, so that a row's result
            does not depend on the other rows. Weights in floats are multiplied by our kernel then, which is
            slower than the vendor's.
    """

    name = "triton"

    def refuse(self, need: KernelNeed) -> list[str]:
        reasons: list[str] = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (pip install 'headrace-kernels[triton]')")
        if need.device not in ("cuda", "cpu"):
            reasons.append(f"device {need.device!r} is not supported, only 'cuda'")
        if need.device == "cpu" and not _interpreting():
            reasons.append("device 'cpu' is served only by the interpreter (TRITON_INTERPRET=1)")
        if need.dtype not in DTYPES:
            reasons.append(f"dtype {need.dtype!r} is not supported, only {list(DTYPES)}")
        return reasons

    def priority(self, need: KernelNeed) -> int:
        return 100 if need.device == "cuda" else -1

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        # Imported here, not above: this module must be importable without triton.
        from headrace_kernels.triton import (
            activations,
            cache_write,
            channelwise,
            elementwise,
            head_linear,
            linear,
            low_rank,
            mla_attention,
            moe,
            norms,
            quant_linear,
            recurrent,
            rotary,
            routing,
            varlen_attention,
        )
        from headrace_kernels.triton import unified_attention as attention

        invariant = self.row_invariant(need)
        return {
            **({"linear": linear.FixedOrderLinear()} if invariant else {}),
            "rms_norm": norms.rms_norm,
            "add_rms_norm": norms.add_rms_norm,
            "layer_norm": norms.layer_norm,
            "add_layer_norm": norms.add_layer_norm,
            "activation": activations.activation,
            "activation_and_mul": activations.activation_and_mul,
            "xielu": activations.xielu,
            "gaussian_topk": norms.gaussian_topk,
            "match_rms": norms.match_rms,
            "gate": elementwise.gate,
            "mix": elementwise.mix,
            "head_linear": head_linear.HeadLinear(),
            "quant_linear": quant_linear.QuantLinear(batch_invariant=invariant),
            "route_experts": routing.route_experts,
            "moe": moe.MoE(batch_invariant=invariant),
            "expert_linear": moe.ExpertLinear(batch_invariant=invariant),
            "low_rank": low_rank.LowRank(batch_invariant=invariant),
            "rotary": rotary.rotary,
            "cache_write": cache_write.cache_write,
            "rotary_cache_write": rotary.rotary_cache_write,
            "paged_attention": functools.partial(
                attention.paged_attention, batch_invariant=invariant
            ),
            "causal_conv": recurrent.causal_conv,
            "selective_scan": recurrent.selective_scan,
            "state_space_scan": recurrent.state_space_scan,
            "delta_rule": recurrent.delta_rule,
            "rg_lru": channelwise.rg_lru,
            "wkv": channelwise.wkv,
            "gated_rms_norm": recurrent.gated_rms_norm,
            "varlen_attention": varlen_attention.varlen_attention,
            "mla_cache_write": mla_attention.mla_cache_write,
            "mla_attention": functools.partial(
                mla_attention.mla_attention, batch_invariant=invariant
            ),
        }

    def row_invariant(self, need: KernelNeed) -> bool:
        """True under HEADRACE_BATCH_INVARIANT=1; only attention, experts, adapters and weights look at the
        batch."""
        return os.environ.get("HEADRACE_BATCH_INVARIANT") == "1"


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


PROVIDER = TritonProvider()
