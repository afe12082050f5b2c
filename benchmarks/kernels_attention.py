"""Attention kernels alone: ``python benchmarks/kernels_attention.py --help``.

Each row is one layer's call: prefill of one prompt, a chunk of it, decode of a batch at a context. Beside
it, on the same data, torch's scaled_dot_product_attention over keys and values that lie dense already (an
engine would have to gather them first, so torch is given an advantage). Calls go round over so many places
of a large cache that decode reads memory, not the last-level cache, as between the layers of a model.

With ``--caches`` calls over caches of several storages take turns instead, so that all see the same machine:
``python benchmarks/kernels_attention.py --caches auto,int8,int8_per_token_head,int4_per_token_head``. Each is
compared with the first.

A prefill is compared with the best bf16 matrix product, counting what a causal row sees; a decode with the
best plain read loop. Both limits are measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import limits
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace_core.attention import KVViews
from headrace_core.kv import CACHE_DTYPES, FullAttentionSpec
from headrace_core.ops import KernelNeed
from headrace_core.ops.vnni import vnni_packed
from headrace_engine.execution.cache import split_rows
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.provider import PROVIDER

BLOCK = 16
ROUND_BYTES = 192 << 20
SHAPES = {"qwen3-0.6b": (16, 8, 128), "llama3.2-1b": (32, 8, 64)}
"""Query heads, kv heads, head size."""


class Case(NamedTuple):
    """Requests of equal length: how many, new tokens of each, context of each."""

    requests: int
    new: int
    context: int

    def __str__(self) -> str:
        if self.new == 1:
            return f"decode {self.requests} at {self.context}"
        return f"prefill {self.new}" + ("" if self.new == self.context else f" of {self.context}")


QUICK = [
    Case(1, 512, 512),
    Case(1, 2048, 2048),
    Case(1, 1, 128),
    Case(1, 1, 8192),
    Case(64, 1, 300),
]
FULL = [
    Case(1, 512, 512), Case(1, 2048, 2048), Case(1, 4096, 4096), Case(1, 512, 4096),
    Case(1, 1, 128), Case(1, 1, 512), Case(1, 1, 2048), Case(1, 1, 8192),
    Case(8, 1, 300), Case(8, 1, 2048), Case(64, 1, 300), Case(64, 1, 1024),
]  # fmt: skip


DECODES = [Case(1, 1, 8192), Case(1, 1, 32768), Case(8, 1, 2048), Case(64, 1, 1024)]


class Data(NamedTuple):
    """One layer's inputs: query [T, Hq, D], plain or VNNI-packed caches, tables, dense [B, Hk, L, D]."""

    query: Tensor
    caches: KVViews
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    dense: tuple[Tensor, ...]
    scales: dict[str, Tensor]


def make(
    case: Case, shape: tuple[int, int, int], dtype: torch.dtype, pairs: bool, kind: str = "auto"
) -> list[Data]:
    """Places to go round over; blocks are scattered, in the memory order (N, 2, Hk, S, D), in large
    pages as an engine's cache. The dense copies are of a plain cache; ``kind`` is a kv_cache_dtype."""
    q_heads, kv_heads, dim = shape
    per = -(-case.context // BLOCK)
    stored = CACHE_DTYPES[kind] or str(dtype).removeprefix("torch.")
    spec = FullAttentionSpec(BLOCK, kv_heads, dim, stored)
    rounds = max(1, min(64, ROUND_BYTES // (spec.page_bytes * case.requests * per)))
    count = rounds * case.requests * per
    memory = packed_buffer(spec.page_bytes * count).view(count, 2, kv_heads, BLOCK, -1)
    caches, scales = fill(memory, spec, dtype)
    tables = torch.randperm(count).int().view(rounds, case.requests, per)
    result = []
    for table in tables:
        dense: tuple[Tensor, ...] = ()
        if kind == "auto":
            blocks = torch.stack(caches, 1).transpose(2, 3)[table.long()]
            dense = tuple(blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[..., : case.context, :])
        result.append(
            Data(
                torch.randn(case.requests * case.new, q_heads, dim).to(dtype),
                vnni_packed(caches) if pairs and kind == "auto" else caches,
                table,
                torch.arange(case.requests + 1, dtype=torch.int32) * case.new,
                torch.full((case.requests,), case.context, dtype=torch.int32),
                tuple(x.contiguous() for x in dense),
                scales,
            )
        )
    return result


def fill(
    memory: Tensor, spec: FullAttentionSpec, dtype: torch.dtype
) -> tuple[KVViews, dict[str, Tensor]]:
    """Random numbers in bytes [N, 2, Hk, S, width]: views of them, and scales for the ops."""
    tokens, heads, dim = memory.shape[0] * BLOCK, spec.num_kv_heads, spec.head_dim
    names = {
        "float8_e4m3": "float8_e4m3fn",
        "int8_per_token_head": "int8",
        "int4_per_token_head": "uint8",
    }
    kind = getattr(torch, names.get(spec.dtype, spec.dtype))
    own: Tensor | None = None
    rows = memory.view(kind)
    if spec.row_scales:
        rows, own = split_rows(rows, spec)
    rows, scales = rows.transpose(2, 3), {}
    caches = KVViews(rows[:, 0], rows[:, 1])
    if own is not None:
        scales = dict(zip(("k_scale", "v_scale"), own.transpose(2, 3).unbind(1)))
    elif kind is torch.int8:
        scales = {name: torch.full((heads,), 3 / 127) for name in ("k_scale", "v_scale")}
    for start in range(0, tokens, 4096):
        slots = torch.arange(start, min(start + 4096, tokens))
        both = torch.randn(2, len(slots), heads, dim).to(dtype)
        OPS["cache_write"](*both, *caches, slots, **scales)
    return caches, scales


def ours(data: Data, case: Case) -> Tensor:
    return OPS["paged_attention"](
        data.query, *data.caches, data.block_table, data.cu_seqlens_q, data.seq_lens,
        max_seqlen_q=case.new, max_seqlen_k=case.context, scale=data.query.shape[2] ** -0.5,
        **data.scales,
    )  # fmt: skip


def torchs(data: Data, case: Case) -> Tensor:
    """Not asked for chunks, for which torch needs a mask."""
    query = data.query.unflatten(0, (case.requests, case.new)).transpose(1, 2)
    out = scaled_dot_product_attention(query, *data.dense, is_causal=case.new > 1, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def seconds_of(
    op: Callable[[Data, Case], Tensor], rounds: list[Data], case: Case, budget: float
) -> float:
    """Median over calls, for about `budget` seconds."""
    op(rounds[0], case)
    times: list[float] = []
    while len(times) < 5 or (sum(times) < budget and len(times) < 400):
        start = time.perf_counter()
        op(rounds[len(times) % len(rounds)], case)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(
    case: Case,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    budget: float,
    *,
    compare: bool,
    pairs: bool,
) -> dict[str, float]:
    q_heads, kv_heads, dim = shape
    rounds = make(case, shape, dtype, pairs)
    seen = case.requests * sum(range(case.context - case.new + 1, case.context + 1))
    row = {"seconds": seconds_of(ours, rounds, case, budget)}
    row["gflop_s"] = 4 * q_heads * dim * seen / row["seconds"] / 1e9
    read = 2 * case.requests * case.context * kv_heads * dim * dtype.itemsize
    row["gb_s"] = read / row["seconds"] / 1e9
    if compare and case.new in (1, case.context):
        row["torch"] = seconds_of(torchs, rounds, case, budget) / row["seconds"]
    return row


def compare_caches(args: argparse.Namespace, pairs: bool) -> None:
    """A line for each case: medians of calls in turn, over the first storage's."""
    kinds, dtype = args.caches.split(","), getattr(torch, args.dtype)
    for case in DECODES if args.quick else [*DECODES, Case(1, 2048, 2048)]:
        made = {kind: make(case, SHAPES[args.shape], dtype, pairs, kind) for kind in kinds}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        while min(map(len, times.values())) < 7 or sum(
            map(sum, times.values())
        ) < args.seconds * len(kinds):
            for kind, rounds in made.items():
                data = rounds[len(times[kind]) % len(rounds)]
                start = time.perf_counter()
                ours(data, case)
                times[kind].append(time.perf_counter() - start)
        medians = {kind: statistics.median(spent) for kind, spent in times.items()}
        first = medians[kinds[0]]
        if args.json:
            print(json.dumps({"case": str(case), "seconds": medians}))
            continue
        row = (f"{kind} {s * 1e3:.3f} ms ({s / first:.2f})" for kind, s in medians.items())
        print(f"{case!s:22} {', '.join(row)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--caches", help="storages to compare, of " + ", ".join(CACHE_DTYPES))
    parser.add_argument("--quick", action="store_true", help="a few cases")
    parser.add_argument(
        "--plain", action="store_true", help="a plain cache where VNNI-packed ones serve"
    )
    parser.add_argument("--no-torch", action="store_true", help="do not time torch")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    args = parser.parse_args()
    torch.manual_seed(0)
    pairs = PROVIDER.vnni_packed(KernelNeed("cpu", args.dtype)) and not args.plain
    if args.caches:
        return compare_caches(args, pairs)
    limit = limits.measure()
    order = "VNNI-packed" if pairs else "plain"
    print(f"# {args.shape} {args.dtype}, {order} caches; limits: {json.dumps(limit._asdict())}")
    peak = limit.fp32_gflop_s if args.dtype == "float32" else limit.bf16_gflop_s
    for case in QUICK if args.quick else FULL:
        row = measure(
            case,
            SHAPES[args.shape],
            getattr(torch, args.dtype),
            args.seconds,
            compare=not args.no_torch,
            pairs=pairs,
        )
        share = row["gb_s"] / limit.read_gb_s if case.new == 1 else row["gflop_s"] / peak
        if args.json:
            print(json.dumps({"case": str(case), "of_limit": share, **row}))
            continue
        torch_ratio = f"{row['torch']:7.2f}x torch" if "torch" in row else ""
        print(
            f"{case!s:22} {row['seconds'] * 1e3:9.3f} ms {row['gflop_s']:8.1f} GFLOP/s "
            f"{row['gb_s']:7.1f} GB/s {share:5.2f} of the limit {torch_ratio}"
        )


OPS = PROVIDER.operations(KernelNeed("cpu", "bfloat16"))

if __name__ == "__main__":
    main()
