"""Compile what the host functions would launch, for a GPU that need not be there.

Usage: ``python offline_compile.py CAPABILITY DTYPE HEAD_DIM...``; prints a JSON list of
``{name, shared, code_bytes}``. Exit code 77 = cannot be done here, with the reason on stdout.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch

from headrace_core.ops import GATED_ACTIVATIONS, OPENINGS, HeadNorm

try:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction
except ImportError as error:
    print(f"this triton has no offline compilation: {error}")
    raise SystemExit(77) from None

COMPILED: list[dict[str, Any]] = []


class AbsentGPU:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What ``kernel[grid]`` is in this process."""

    def launch(*args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **options)
        COMPILED.append(
            {
                "name": kernel.__name__,
                "shared": made.metadata.shared,
                "code_bytes": len(made.asm["cubin"]),
                "multiplies_float8": bool(re.search(r"mma\S*\.e4m3\.e4m3", made.asm["ptx"])),
            }
        )

    return launch


def small_ops(dtype: torch.dtype) -> None:
    from headrace_kernels.triton import activations, elementwise, head_linear, linear, norms

    x, weight = torch.ones(5, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    norms.rms_norm(x, weight, 1e-6)
    norms.add_rms_norm(x, x, weight, 1e-6)
    norms.layer_norm(x, weight, weight, 1e-6)
    norms.layer_norm(x, weight, None, 1e-6)
    norms.add_layer_norm(x, x, weight, weight, 1e-6)
    for kind in GATED_ACTIVATIONS:
        activations.activation_and_mul(x, kind)
    activations.activation(x, "gelu")
    activations.xielu(x, 0.8, 0.9)
    norms.match_rms(x, x, 1e-5)
    norms.gaussian_topk(x, 1.6)
    for kind in (None, *OPENINGS):
        elementwise.gate(x, x[:, :32], activation=kind)
    streams, weights = torch.ones(5, 4, 4096, dtype=dtype), torch.ones(5, 4, 4)
    elementwise.mix(streams, weights)
    elementwise.mix(streams, weights, streams)
    op = head_linear.HeadLinear()
    op(torch.ones(5, 8, 128, dtype=dtype), op.pack(torch.ones(8, 512, 128, dtype=dtype)))
    whole = linear.FixedOrderLinear()
    whole(x, whole.pack(torch.ones(512, 4096, dtype=dtype)), torch.ones(512, dtype=dtype))


def expert_ops(dtype: torch.dtype) -> None:
    from headrace_kernels.triton import low_rank, moe, routing

    scores, bias = torch.ones(3, 64, dtype=dtype), torch.ones(64)
    routing.route_experts(scores, 6)
    routing.route_experts(scores, 2, scoring="sparsemixer", jitter=0.1)
    for group_score in ("max", "top2"):
        routing.route_experts(
            scores, 6, scoring="sigmoid", bias=bias, num_groups=8, top_groups=4,
            group_score=group_score, renormalise=True,
        )  # fmt: skip
    op = moe.ExpertLinear()
    op(
        torch.ones(3, 512, dtype=dtype),
        op.pack(torch.ones(4, 64, 512, dtype=dtype)),
        torch.zeros(3, 2, dtype=torch.int64),
    )
    gate_up, down = torch.ones(4, 256, 512, dtype=dtype), torch.ones(4, 512, 128, dtype=dtype)
    biases = torch.ones(4, 256, dtype=dtype), torch.ones(4, 512, dtype=dtype)
    for rows in (3, 300):
        x = torch.ones(rows, 512, dtype=dtype)
        chosen = torch.ones(rows, 2), torch.zeros(rows, 2, dtype=torch.int64)
        for kind, added in (("silu", ()), ("clamped_swiglu", biases)):
            op = moe.MoE()
            op(x, op.pack(gate_up, down, *added), *chosen, kind)
    adapters = low_rank.LowRank()
    for rows, slots in (
        (3, torch.zeros(8, dtype=torch.int32)),
        (300, torch.zeros(300, dtype=torch.int32)),
    ):
        x = torch.ones(rows, 2048, dtype=dtype)
        adapters(x, x, adapters.allocate(4, 64, 2048, (1024, 512, 512), x), slots)


def rotary_ops(dtype: torch.dtype) -> None:
    from headrace_kernels.triton import cache_write, rotary

    fused = torch.ones(5, 12, 128, dtype=dtype)
    query, key, value = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    cache = torch.zeros(9, 2, 2, 16, 128, dtype=dtype).permute(1, 0, 3, 2, 4)
    index, angles = torch.arange(5), torch.ones(50, 128)
    norm = HeadNorm(torch.ones(128, dtype=dtype), torch.ones(128, dtype=dtype), 1e-6)
    cache_write.cache_write(key, value, cache[0], cache[1], index)
    rotary.rotary(query, key, index, angles, interleaved=True)
    for table in (angles, angles[:, :64].contiguous(), None):
        for head_norm in (None, norm):
            rotary.rotary_cache_write(
                query, key, value, index, table, cache[0], cache[1], index, head_norm=head_norm
            )


def attention(dtype: torch.dtype, head_dims: list[int]) -> None:
    from headrace_kernels.triton import merge, mla_attention, varlen_attention
    from headrace_kernels.triton import unified_attention as unified

    for head_dim in head_dims:
        query = torch.ones(5, 8, head_dim, dtype=dtype)
        cache = torch.zeros(9, 2, 2, 16, head_dim, dtype=dtype).permute(1, 0, 3, 2, 4)
        options = {"sliding_window": 20, "soft_cap": 5.0, "sinks": torch.ones(8, dtype=dtype)}
        local = {"attention_chunk": 16, "alibi_slopes": torch.ones(8)}
        counted = {"key_counts": torch.ones(5, dtype=torch.int32), "lse": torch.ones(5, 8)}
        calls: tuple[tuple[int, int, dict[str, Any]], ...] = (
            (1, 40, {}), (1, 4000, {}), (1, 4000, local), (5, 40, options), (5, 40, local),
            (5, 40, {"causal": False}), (1, 40, counted), (1, 4000, counted),
        )  # fmt: skip
        for longest_query, longest_context, extra in calls:
            unified.paged_attention(
                query,
                cache[0],
                cache[1],
                torch.zeros(5, 4, dtype=torch.int32),
                torch.arange(6, dtype=torch.int32),
                torch.full((5,), 40, dtype=torch.int32),
                max_seqlen_q=longest_query,
                max_seqlen_k=longest_context,
                scale=0.1,
                **extra,
            )
        ends, bias = torch.tensor([0, 2, 5], dtype=torch.int32), torch.ones(8, 79)
        both_ways: dict[str, Any] = {"sliding_window": 20, "soft_cap": 5.0, "distance_bias": bias}
        both_ways["key_lens"] = torch.tensor([2, 1], dtype=torch.int32)
        for extra in ({}, both_ways):
            varlen_attention.varlen_attention(
                query, query[:, :2], query[:, :2], ends, max_seqlen=3, scale=0.1, **extra
            )
        lse = torch.ones(8, 5)
        # DeepSeek's sizes: they do not follow the head's.
        latent, rope = torch.ones(5, 40, 512, dtype=dtype), torch.ones(5, 40, 64, dtype=dtype)
        vectors = torch.zeros(9, 64, 576, dtype=dtype)
        mla_attention.mla_cache_write(latent[:, 0], rope[:, 0], vectors, torch.arange(5))
        counted["lse"] = torch.ones(5, 40)
        for longest_context, extra in ((40, {}), (4000, {}), (40, counted), (4000, counted)):
            mla_attention.mla_attention(
                latent,
                rope,
                vectors,
                torch.zeros(5, 4, dtype=torch.int32),
                torch.arange(6, dtype=torch.int32),
                torch.full((5,), 40, dtype=torch.int32),
                max_seqlen_q=1,
                max_seqlen_k=longest_context,
                scale=0.1,
                **extra,
            )
        merge.merge_attn_states(query.clone(), query, lse, query, lse, lse.clone())


def recurrences(dtype: torch.dtype) -> None:
    from headrace_kernels.triton import channelwise, recurrent

    ends, blocks = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([1, -1])
    state = (torch.ones(3, 64, 3, dtype=dtype), blocks, blocks, ends)
    x, vector, weight = (
        torch.ones(5, 64, dtype=dtype),
        torch.ones(64),
        torch.ones(64, 4, dtype=dtype),
    )
    recurrent.causal_conv(x, weight, None, *state, activation="silu")
    narrow = torch.ones(5, 16, dtype=dtype)
    kept = (torch.ones(3, 64, 16), blocks, blocks, ends)
    rates = torch.ones(64, 16)
    recurrent.selective_scan(x, x, rates, narrow, narrow, vector, *kept, dt_bias=vector, gate=x)
    kept = (torch.ones(3, 64), blocks, blocks, ends)
    channelwise.rg_lru(x, x, x, vector, *kept, input_bias=vector, decay_bias=vector)
    kept = (torch.ones(3, 3, 64), blocks, blocks, ends)
    channelwise.wkv(x, x, vector, vector, *kept)
    heads, each = torch.ones(5, 8, 64, dtype=dtype), torch.ones(8)
    groups, steps = torch.ones(5, 2, 128, dtype=dtype), torch.ones(5, 8, dtype=dtype)
    kept = (torch.ones(3, 8, 64, 128), blocks, blocks, ends)
    recurrent.state_space_scan(heads, steps, each, groups, groups, each, *kept, dt_bias=each)
    kept = (torch.ones(3, 8, 128, 64), blocks, blocks, ends)
    recurrent.delta_rule(
        groups, groups, heads, steps, steps, each, each, *kept, scale=0.1, l2_norm_eps=1e-6
    )
    recurrent.gated_rms_norm(x, x, torch.ones(64, dtype=dtype), 1e-6, norm_first=True)


def main() -> None:
    capability, dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    driver.set_active(AbsentGPU(capability))
    JITFunction.__getitem__ = compile_only
    # The plan asks how many programs fill the device; a CPU's answer would never split.
    from headrace_kernels.triton import unified_attention

    unified_attention._num_programs_wanted = lambda device: 264
    from headrace_kernels.triton import mla_attention

    mla_attention._num_programs_wanted = lambda device: 264
    small_ops(dtype)
    rotary_ops(dtype)
    expert_ops(dtype)
    recurrences(dtype)
    attention(dtype, [int(head_dim) for head_dim in sys.argv[3:]])
    print(json.dumps(COMPILED))


if __name__ == "__main__":
    main()
