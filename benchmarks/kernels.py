"""Linear layers, kernel by kernel, against torch: ``python benchmarks/kernels.py --help``.

Every shape of the models' layers at every number of rows that a step may have, weights met in memory as in a
real step (copies beyond the caches), beside torch's linear and oneDNN with a packed weight; and the share of
what the machine's reads and products would allow. Attention, quantization and sampling have programs of
their own beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import limits
import timing
import torch

from headrace_core.ops import KernelNeed, bind_ops

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
HEAD_ROWS = 64
"""Most rows of a head: logits are made for sampled positions only."""


def main() -> None:
    parser = timing.arguments((__doc__ or "").split("\n")[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
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
        measured = measure(name, inputs, outputs, rows, args.dtype, limit, quick=args.quick)
        timing.save(measured, args.json, dtype=args.dtype)
        print(timing.table(measured) + "\n", flush=True)


def measure(
    name: str,
    inputs: int,
    outputs: int,
    rows: Sequence[int],
    dtype: str,
    limit: timing.Limits,
    *,
    quick: bool,
) -> list[timing.Row]:
    """One layer at several numbers of rows."""
    kind = getattr(torch, dtype)
    op = bind_ops(KernelNeed("cpu", dtype, torch.get_num_threads())).linear
    num_bytes = inputs * outputs * kind.itemsize
    copies = timing.copies_beyond_caches(num_bytes, total=(32 if quick else 128) << 20)
    weights = [(torch.randn(outputs, inputs) * 0.02).to(kind) for _ in range(copies)]
    packed = [op.pack(weight) for weight in weights]
    found = []
    for count in rows:
        x = torch.randn(count, inputs).to(kind)
        candidates = {
            "headrace": timing.rotate([partial(op, x, p) for p in packed]),
            "torch": timing.rotate([partial(torch.nn.functional.linear, x, w) for w in weights]),
            **_onednn(x, weights),
        }
        with torch.inference_mode():
            timings = timing.compare(candidates, rounds=3 if quick else 7)
        work = timing.Work(bytes=num_bytes, flops=2 * count * inputs * outputs)
        found.append(timing.Row(f"{name}, {count} rows", timings, work, limit))
    return found


def _onednn(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> dict[str, timing.Call]:
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

    return {"oneDNN, packed": timing.rotate([partial(call, weight) for weight in packed])}


if __name__ == "__main__":
    main()
