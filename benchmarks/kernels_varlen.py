"""Attention without a cache alone: ``python benchmarks/kernels_varlen.py --help``.

Each row is one layer's call on a batch of whole sequences, whose queries, keys and values are slices of one
fused projection, as in a model. Beside it, on the same data, torch's scaled_dot_product_attention: called
for each sequence by itself, and once for the batch padded to its longest sequence with a mask (padding and
taking it off again are not counted). Calls go round over as many inputs as a model has layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import limits
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from headrace_core.ops import KernelNeed
from headrace_kernels.cpu.provider import PROVIDER

SHAPES = {"minilm": (12, 32), "bert-base": (12, 64), "whisper-base": (8, 64)}
"""Heads, head size."""
LAYERS = 12


def _ragged(count: int, shortest: int, longest: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()


BATCHES: dict[str, Sequence[int]] = {
    "1 of 16": [16],
    "1 of 128": [128],
    "1 of 512": [512],
    "32 of 16": [16] * 32,
    "32 of 128": [128] * 32,
    "8 of 16 to 256": _ragged(8, 16, 256),
    "32 of 16 to 256": _ragged(32, 16, 256),
    "1 of 1500": [1500],
}


class Data(NamedTuple):
    """One layer's inputs; padded ones [B, H, L, D] and their mask [B, 1, 1, L]."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens: Tensor
    padded: tuple[Tensor, Tensor, Tensor]
    mask: Tensor | None


def make(lengths: Sequence[int], shape: tuple[int, int], dtype: torch.dtype) -> list[Data]:
    heads, dim = shape
    longest, starts = max(lengths), [0, *itertools.accumulate(lengths)]
    real = torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]
    mask = None if all(length == longest for length in lengths) else real[:, None, None]
    result = []
    for _ in range(LAYERS):
        fused = torch.randn(sum(lengths), 3 * heads * dim).to(dtype)
        query, key, value = fused.unflatten(1, (3, heads, dim)).unbind(1)
        padded = tuple(
            pad_sequence(list(x.split(list(lengths))), batch_first=True).transpose(1, 2)
            for x in (query, key, value)
        )
        ends = torch.tensor(starts, dtype=torch.int32)
        result.append(Data(query, key, value, ends, padded, mask))  # type: ignore[arg-type]
    return result


def ours(data: Data, lengths: Sequence[int]) -> Tensor:
    out: Tensor = OPS["varlen_attention"](
        data.query, data.key, data.value, data.cu_seqlens,
        max_seqlen=max(lengths), scale=data.query.shape[2] ** -0.5,
    )  # fmt: skip
    return out


def one_by_one(data: Data, lengths: Sequence[int]) -> Tensor:
    out = torch.empty(data.query.shape, dtype=data.query.dtype)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        query, key, value = (x[rows].transpose(0, 1)[None] for x in data[:3])
        out[rows] = scaled_dot_product_attention(query, key, value)[0].transpose(0, 1)
        start += length
    return out


def padded(data: Data, lengths: Sequence[int]) -> Tensor:
    return scaled_dot_product_attention(*data.padded, attn_mask=data.mask)


def seconds_of(
    op: Callable[[Data, Sequence[int]], Tensor],
    rounds: list[Data],
    lengths: Sequence[int],
    budget: float,
) -> float:
    """Median over calls, for about `budget` seconds."""
    op(rounds[0], lengths)
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget:
        start = time.perf_counter()
        op(rounds[len(times) % len(rounds)], lengths)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="minilm")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-torch", action="store_true", help="do not time torch")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    OPS.update(PROVIDER.operations(KernelNeed("cpu", args.dtype, num_threads=args.threads)))
    limit = limits.measure()
    print(f"# {args.shape} {args.dtype}, {args.threads} threads; {json.dumps(limit._asdict())}")
    peak = limit.fp32_gflop_s if args.dtype == "float32" else limit.bf16_gflop_s
    heads, dim = SHAPES[args.shape]
    for name, lengths in BATCHES.items():
        rounds = make(lengths, (heads, dim), getattr(torch, args.dtype))
        row = {"seconds": seconds_of(ours, rounds, lengths, args.seconds)}
        row["gflop_s"] = 4 * heads * dim * sum(n * n for n in lengths) / row["seconds"] / 1e9
        row["of_limit"] = row["gflop_s"] / peak
        if not args.no_torch:
            for other in (one_by_one, padded):
                seconds = seconds_of(other, rounds, lengths, args.seconds)
                row[other.__name__] = seconds / row["seconds"]
        if args.json:
            print(json.dumps({"batch": name, **row}))
            continue
        ratios = " ".join(f"{row[k]:6.2f}x {k}" for k in ("one_by_one", "padded") if k in row)
        print(
            f"{name:16} {row['seconds'] * 1e3:9.3f} ms {row['gflop_s']:8.1f} GFLOP/s "
            f"{row['of_limit']:5.2f} of the limit {ratios}"
        )


OPS: dict[str, Callable[..., Tensor]] = {}

if __name__ == "__main__":
    main()
