"""Linear layers, kernel by kernel, against torch: ``python benchmarks/kernels.py --help``.

Every shape of the models' layers at every number of rows that a step may have, weights met in memory as in a
real step (copies beyond the caches), beside torch's linear and oneDNN with a packed weight; and the share of
what the machine's reads and products would allow. Layers of gate and up also in their gated form, beside the
two steps. Each layer's table is followed by how many numbers of rows changed a row's bits, for each program.
Attention, quantization and sampling have programs of their own beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import limits
import timing
import torch

from headrace_core.ops import KernelNeed, PackedLinear, bind_ops

SHAPES = {
    "qwen06 qkv": (1024, 4096),
    "qwen06 out": (2048, 1024),
    "qwen06 gate_up": (1024, 6144),
    "qwen06 down": (3072, 1024),
    "qwen06 head": (1024, 151936),
    "llama1b qkv": (2048, 3072),
    "llama1b out": (2048, 2048),
    "llama1b gate_up": (2048, 16384),
    "llama1b down": (8192, 2048),
    "llama1b head": (2048, 128256),
}
"""Layer -> input features, output features."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
VARIANCE_ROWS = (2, 3, 4, 7, 8, 16, 17, 32, 64, 128, 512)
HEAD_ROWS = 64
"""Most rows of a head: logits are made for sampled positions only."""


def main() -> None:
    parser = timing.arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    args = parser.parse_args()
    machine = limits.measure(quick=args.quick)
    flops = machine.bf16_gflop_s if args.dtype == "bfloat16" else machine.fp32_gflop_s
    limit = timing.Limits(machine.read_gb_s * 1e9, flops * 1e9)
    print(f"{machine}\n", flush=True)
    for name, (inputs, outputs) in SHAPES.items():
        if args.only not in name:
            continue
        rows = [count for count in args.rows if "head" not in name or count <= HEAD_ROWS]
        layer = Layer(name, inputs, outputs, args.dtype, quick=args.quick)
        measured = [layer.measure(count, limit) for count in rows]
        if "gate_up" in name:
            measured += [layer.measure_gated(count, limit) for count in rows]
        timing.save(measured, args.json, dtype=args.dtype)
        print(table(measured))
        print(
            f"\nrows changed by their number, of {list(VARIANCE_ROWS)}: {layer.variance()}\n",
            flush=True,
        )


class Layer:
    """Copies of one layer's weight, as every candidate wants them."""

    def __init__(self, name: str, inputs: int, outputs: int, dtype: str, *, quick: bool) -> None:
        self.name, self.inputs, self.outputs, self.quick = name, inputs, outputs, quick
        self.kind = getattr(torch, dtype)
        self.ops = bind_ops(KernelNeed("cpu", dtype, torch.get_num_threads()))
        self.num_bytes = inputs * outputs * self.kind.itemsize
        copies = timing.copies_beyond_caches(self.num_bytes, total=(32 if quick else 128) << 20)
        self.weights = [(torch.randn(outputs, inputs) * 0.02).to(self.kind) for _ in range(copies)]
        self.packed = [self.ops.linear.pack(weight) for weight in self.weights]

    def measure(self, count: int, limit: timing.Limits) -> timing.Row:
        """The product alone."""
        x = torch.randn(count, self.inputs).to(self.kind)
        calls = {name: timing.rotate(each) for name, each in self.candidates(x).items()}
        return self._row(f"{self.name}, {count} rows", count, calls, limit)

    def measure_gated(self, count: int, limit: timing.Limits) -> timing.Row:
        """``silu(gate) * up``: ours in one pass and in two steps, torch's in three."""
        x, half = torch.randn(count, self.inputs).to(self.kind), self.outputs // 2
        gated, linear, act = self.ops.linear.gated, self.ops.linear, self.ops.activation_and_mul

        def by_torch(weight: torch.Tensor) -> torch.Tensor:
            both = torch.nn.functional.linear(x, weight)
            return torch.nn.functional.silu(both[:, :half]) * both[:, half:]

        def in_two(packed: PackedLinear) -> torch.Tensor:
            return act(linear(x, packed), "silu")

        calls = {
            "headrace": timing.rotate([partial(gated, x, p, "silu") for p in self.packed]),
            "torch": timing.rotate([partial(by_torch, w) for w in self.weights]),
            "headrace, two steps": timing.rotate([partial(in_two, p) for p in self.packed]),
        }
        return self._row(f"{self.name} gated, {count} rows", count, calls, limit)

    def variance(self) -> dict[str, int]:
        """For each candidate, at how many numbers of rows the first row's bits are not those that
        it has alone."""
        x = torch.randn(max(VARIANCE_ROWS), self.inputs).to(self.kind)
        with torch.inference_mode():
            alone = {name: calls[0]() for name, calls in self.candidates(x[:1]).items()}
            changed = dict.fromkeys(alone, 0)
            for count in VARIANCE_ROWS:
                for name, calls in self.candidates(x[:count]).items():
                    changed[name] += not torch.equal(calls[0]()[:1], alone[name])
        return changed

    def candidates(self, x: torch.Tensor) -> dict[str, list[Callable[[], torch.Tensor]]]:
        """The product by each program, with each copy of the weight."""
        linear = torch.nn.functional.linear
        return {
            "headrace": [partial(self.ops.linear, x, packed) for packed in self.packed],
            "torch": [partial(linear, x, weight) for weight in self.weights],
            **_onednn(x, self.weights),
        }

    def _row(
        self, case: str, count: int, calls: dict[str, timing.Call], limit: timing.Limits
    ) -> timing.Row:
        with torch.inference_mode():
            timings = timing.compare(calls, rounds=3 if self.quick else 7)
        flops = 2 * count * self.inputs * self.outputs
        return timing.Row(case, timings, timing.Work(self.num_bytes, flops), limit)


def table(rows: Sequence[timing.Row]) -> str:
    """Markdown: GFLOP/s (and GB/s of weights) of each candidate, ours in ratio to the best other one."""
    lines: list[str] = []
    names: list[str] = []
    for row in rows:
        if list(row.timings) != names:
            names = list(row.timings)
            heads = ["case", *(f"{name}, GFLOP/s (GB/s)" for name in names)]
            heads += ["headrace is", "of the limit"]
            lines += ["", "| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
        seconds = [row.timings[name].median for name in names]
        rates = [
            f"{row.work.flops / s / 1e9:.0f} ({row.work.bytes / s / 1e9:.1f})" for s in seconds
        ]
        others = [s for name, s in zip(names, seconds) if not name.startswith("headrace")]
        ratio, share = min(others) / seconds[0], row.limits.seconds(row.work) / seconds[0]
        lines.append("| " + " | ".join([row.case, *rates, f"{ratio:.2f}x", f"{share:.0%}"]) + " |")
    return "\n".join(lines[1:])


def _onednn(
    x: torch.Tensor, weights: Sequence[torch.Tensor]
) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """oneDNN with weights in its own layout; nothing where torch brings no oneDNN."""
    mkldnn: Any = torch.ops.mkldnn
    try:
        with torch.inference_mode():
            packed = [mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
    except (AttributeError, RuntimeError):
        return {}

    def call(weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return result

    return {"oneDNN, packed": [partial(call, weight) for weight in packed]}


if __name__ == "__main__":
    main()
