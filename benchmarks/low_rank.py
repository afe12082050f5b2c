"""What adapters add to a linear layer's time: ``python benchmarks/low_rank.py --help``.

``low_rank`` beside the layer's own product, at every number of rows that a step may have, with all rows of
one adapter and with rows of eight in turn. Layers take turns, so that weights and factors are met in memory,
as in a real step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import timing
import torch

from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.ops.optional.low_rank import LOW_RANK

ROWS = (1, 8, 32, 512, 2048)
RANKS = (16, 64)
SLOTS = (1, 8)


def main() -> None:
    parser = timing.arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--outputs", type=int, default=2048)
    args = parser.parse_args()
    layers = Layers(args.inputs, args.outputs, max(args.ranks), args.dtype, quick=args.quick)
    rows = []
    for rank in args.ranks:
        for slots in SLOTS:
            layers.write(rank, slots)
            rows += [
                layers.measure(count, rank, slots)
                for count in args.rows
                if args.only in case(count, rank, slots)
            ]
    timing.save(rows, args.json, dtype=args.dtype)
    print(table(rows))


class Layers:
    """Copies of one layer, more than caches hold, each with its adapters."""

    def __init__(self, inputs: int, outputs: int, rank: int, dtype: str, *, quick: bool) -> None:
        self.inputs, self.outputs, self.quick = inputs, outputs, quick
        self.like = torch.empty(0, dtype=getattr(torch, dtype))
        ops = bind_ops(KernelNeed("cpu", dtype, torch.get_num_threads()))
        self.linear, self.low_rank = ops.linear, ops.optional(LOW_RANK)
        num_bytes = inputs * outputs * self.like.element_size()
        copies = timing.copies_beyond_caches(num_bytes, total=(32 if quick else 128) << 20)
        self.packed = [self.linear.pack(self._rand(outputs, inputs)) for _ in range(copies)]
        self.factors = [
            self.low_rank.allocate(max(SLOTS), rank, inputs, (outputs,), self.like)
            for _ in range(copies)
        ]

    def write(self, rank: int, slots: int) -> None:
        down, up = self._rand(rank, self.inputs), self._rand(self.outputs, rank)
        for factors in self.factors:
            for slot in range(slots):
                self.low_rank.write(factors, slot, 0, down, up, 1.0)

    def measure(self, count: int, rank: int, slots: int) -> timing.Row:
        x, out = self._rand(count, self.inputs), self._rand(count, self.outputs)
        chosen = torch.arange(count, dtype=torch.int32).remainder(slots)
        calls = {
            "low_rank": [partial(self.low_rank, out, x, own, chosen) for own in self.factors],
            "linear": [partial(self.linear, x, packed) for packed in self.packed],
        }
        timings = timing.compare(
            {name: timing.rotate(each) for name, each in calls.items()},
            rounds=2 if self.quick else 7,
        )
        return timing.Row(case(count, rank, slots), timings)

    def _rand(self, *shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.02).to(self.like.dtype)


def case(count: int, rank: int, slots: int) -> str:
    return f"rows {count}, rank {rank}, adapters {slots}"


def table(rows: Sequence[timing.Row]) -> str:
    """A Markdown table: milliseconds of both, and their quotient."""
    lines = ["| case | linear, ms | low_rank, ms | adds |", "|---|---|---|---|"]
    for row in rows:
        linear, own = (row.timings[name].median * 1e3 for name in ("linear", "low_rank"))
        lines.append(f"| {row.case} | {linear:.4g} | {own:.4g} | {own / linear:.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
