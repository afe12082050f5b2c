"""Row-wise kernels against torch: ``python benchmarks/kernels_rows.py --help``.

Head norm with rotation and cache write, norms, and SiLU-and-multiply at every number of rows that a step of
Qwen3-0.6B's shape may have; beside them the reference, plain torch, and the share of what reading and writing
each operand once would allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import limits
import timing
import torch

from headrace_core.ops import HeadNorm, KernelNeed, OpTable, bind_ops

TOKENS = (1, 16, 64, 256, 2048)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 16, 8, 128, 1024, 3072


class Case(NamedTuple):
    """One op on operands of one size."""

    name: str
    call: Callable[[OpTable], timing.Call]
    num_bytes: float
    """Read and written."""


def main() -> None:
    parser = timing.arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    args = parser.parse_args()
    machine = limits.measure(quick=args.quick)
    limit = timing.Limits(machine.read_gb_s * 1e9)
    need = KernelNeed("cpu", args.dtype, torch.get_num_threads())
    tables = {"headrace": bind_ops(need), "torch": bind_ops(need, choose={"*": "reference"})}
    print(f"{machine}\n", flush=True)
    rows = []
    for tokens in args.tokens:
        for case in cases(tokens, getattr(torch, args.dtype)):
            if args.only not in case.name:
                continue
            calls = {name: case.call(ops) for name, ops in tables.items()}
            timings = timing.compare(calls, rounds=2 if args.quick else 7)
            rows.append(timing.Row(case.name, timings, timing.Work(case.num_bytes), limit))
    timing.save(rows, args.json, dtype=args.dtype)
    print(timing.table(rows))


def cases(tokens: int, dtype: torch.dtype) -> Iterator[Case]:
    """Every op at this number of tokens."""
    size = dtype.itemsize
    yield rotary_cache_write(tokens, dtype)
    x, residual = torch.randn(2, tokens, HIDDEN).to(dtype)
    weight = torch.ones(HIDDEN, dtype=dtype)
    each = tokens * HIDDEN * size
    yield Case(f"rms_norm {tokens}", lambda ops: partial(ops.rms_norm, x, weight, 1e-6), 2 * each)
    yield Case(
        f"add_rms_norm {tokens}",
        # The sum grows with every call; its norm costs the same.
        lambda ops: partial(ops.add_rms_norm, x.clone(), residual.clone(), weight, 1e-6),
        4 * each,
    )
    yield Case(
        f"layer_norm {tokens}", lambda ops: partial(ops.layer_norm, x, weight, None, 1e-6), 2 * each
    )
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE).to(dtype)
    yield Case(
        f"silu_and_mul {tokens}",
        lambda ops: partial(ops.activation_and_mul, gate_up, "silu"),
        3 * tokens * INTERMEDIATE * size,
    )


def rotary_cache_write(tokens: int, dtype: torch.dtype) -> Case:
    """Queries and keys in place, as slices of a fused projection; an empty cache."""
    widths = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    fused = torch.randn(tokens, sum(widths)).to(dtype)
    query, key, value = (part.unflatten(1, (-1, HEAD_DIM)) for part in fused.split(widths, 1))
    positions = torch.arange(tokens)
    table = torch.randn(tokens, HEAD_DIM)
    cache = torch.zeros(2, tokens // 16 + 2, 16, KV_HEADS, HEAD_DIM, dtype=dtype)
    weight = torch.ones(HEAD_DIM, dtype=dtype)
    norm = HeadNorm(weight, weight, 1e-6)
    moved = 2 * widths[0] + 3 * widths[1] + 2 * widths[2]

    def call(ops: OpTable) -> timing.Call:
        return partial(
            ops.rotary_cache_write, query, key, value, positions, table, cache[0], cache[1],
            positions + 16, head_norm=norm,
        )  # fmt: skip

    return Case(f"rotary_cache_write {tokens}", call, tokens * moved * dtype.itemsize)


if __name__ == "__main__":
    main()
