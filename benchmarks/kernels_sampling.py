"""Sampling kernels against the plain-torch reference: what choosing tokens costs in a step.

    python benchmarks/kernels_sampling.py                    # 64 rows of 151,936 logits, 2 threads
    python benchmarks/kernels_sampling.py --rows 1 --dtype bfloat16 --skip-reference

Times are medians (and minima) in ms of calls whose logits were written just before, as a step's
are. The reference is what a machine without native kernels computes with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import KernelNeed, OpTable, bind_ops

SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 1000": {"temperature": 0.8, "top_k": 1000},
    "top_p 0.5": {"temperature": 0.8, "top_p": 0.5},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min_p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    need = KernelNeed("cpu", options.dtype, options.threads)
    tables = {"native": bind_ops(need)}
    if not options.skip_reference:
        tables["reference"] = bind_ops(need, choose={"*": "reference"})
    results = []
    for shape, logits in _logits(options.rows, options.vocab, getattr(torch, options.dtype)):
        for name, calls in _cases(tables, logits):
            times = _interleaved(calls, logits, options.repeats)
            results.append({"logits": shape, "case": name, **times})
            figures = "  ".join(f"{who} {m:8.2f} ({low:.2f})" for who, (m, low) in times.items())
            print(f"{shape:8s} {name:24s} {figures}", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--skip-reference", action="store_true")
    parser.add_argument("--json", help="write the figures there")
    return parser


def _logits(rows: int, vocab: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Logits as trained models give them (few likely tokens), and as random weights do."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, vocab, generator=generator)
    peaked = normal * 2.5
    peaked[:, :: vocab // 7] += 12
    yield "peaked", peaked.to(dtype)
    yield "normal", (normal * 2.5).to(dtype)
    yield "flat", (normal * 0.5).to(dtype)


def _cases(
    tables: dict[str, OpTable], logits: Tensor
) -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    rows = logits.shape[0]
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, fields in SETTINGS.items():
        arguments = (
            torch.full((rows,), fields["temperature"]),
            torch.full((rows,), fields.get("min_p", 0.0)),
            torch.full((rows,), int(fields.get("top_k", 0))),
            torch.full((rows,), fields.get("top_p", 1.0), dtype=torch.float64),
            uniform,
        )
        yield (
            name,
            {
                who: lambda ops=ops, a=arguments: ops.sample(logits, *a)
                for who, ops in tables.items()
            },
        )
    chosen = logits.argmax(-1)
    for count in (0, 20):
        counts = torch.full((rows,), count)
        yield (
            f"logprobs {count}",
            {
                who: lambda ops=ops, n=counts: ops.top_logprobs(logits, chosen, n, normalize=True)
                for who, ops in tables.items()
            },
        )


def _interleaved(
    calls: dict[str, Callable[[], Any]], logits: Tensor, repeats: int
) -> dict[str, tuple[float, float]]:
    """Median and minimum in ms, by name."""
    original = logits.clone()
    times: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(repeats + 1):
        for who, call in calls.items():
            logits.copy_(original)
            start = time.perf_counter()
            call()
            times[who].append(1e3 * (time.perf_counter() - start))
    return {who: (statistics.median(ms[1:]), min(ms[1:])) for who, ms in times.items()}


if __name__ == "__main__":
    main()
