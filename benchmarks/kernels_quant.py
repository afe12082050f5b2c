"""Linear layers with integer weights alone: ``python benchmarks/kernels_quant.py --help``.

Each row is one layer's product at one number of rows, activations in bfloat16, beside torch: its bf16
linear, its dynamic int8 linear (fp32 in and out, the only one it has), and its weight-only int8 and int4.
With ``--formats`` a row is a published format instead (Q4_K, nf4, FP8 and so on, as the conformance suite
draws them) beside this engine's own bf16 linear, with the bits of a weight, packed bytes read in a second
and products in a second; ``--list`` names the formats.

Calls go round over copies beyond the caches, so weights come from memory as they do in a decode step.

The limits are measured in the same run: reading by torch's sum over large pages, integer products by
oneDNN's largest. They are what torch reaches, not what the hardware can do: a share may be over 100 %. A
float activation counts as two integer products (it has 16 bits, see docs/quantization.md).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from headrace_core.ops import KernelNeed, QuantizedWeight
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.provider import PROVIDER
from headrace_testing.ops.weights import KINDS as FORMATS

SHAPES = {
    "gate_up": (6144, 1024),
    "qkv": (4096, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
"""Of Qwen3-0.6B: (out, in)."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
KINDS = {
    "w8a8": (8, None, "int8"),
    "w8": (8, None, "float"),
    "w4 g128": (4, 128, "float"),
    "w4 g32": (4, 32, "float"),
}
"""Bits, group size, activations."""


def main() -> None:
    parser = timing.arguments(__doc__)
    parser.add_argument("--shapes", default="gate_up,down", help="of " + ", ".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument("--formats", metavar="NAMES", help="published formats; all for every one")
    parser.add_argument(
        "--activations", default="float", choices=("float", "int8"), help="of formats"
    )
    parser.add_argument("--list", action="store_true", help="name the formats and end")
    arguments = parser.parse_args()
    if arguments.list:
        print(", ".join(FORMATS))
        return
    ops = PROVIDER.operations(KernelNeed("cpu", "bfloat16", num_threads=torch.get_num_threads()))
    read, products = _read_bytes_s(), _int8_ops_s()
    print(f"torch reads {read / 1e9:.1f} GB/s, multiplies int8 at {products / 1e12:.2f} TOP/s")
    rounds = (
        {"rounds": 3, "min_seconds": 0.003}
        if arguments.quick
        else {"rounds": 7, "min_seconds": 0.01}
    )
    if arguments.formats:
        for shape in arguments.shapes.split(","):
            _compare_formats(ops, shape, arguments, timing.Limits(read, products), rounds)
        return
    for shape, (kind, settings) in itertools.product(arguments.shapes.split(","), KINDS.items()):
        if arguments.only not in f"{shape} {kind}":
            continue
        rows = []
        layer = Layer(
            ops["quant_linear"], *SHAPES[shape], *settings, with_torch=not arguments.no_torch
        )
        for count in map(int, arguments.rows.split(",")):
            x = torch.randn(count, layer.inputs).bfloat16()
            timings = timing.compare(layer.calls(x), **rounds)
            work = timing.Work(
                layer.num_bytes, layer.limbs * 2.0 * count * layer.inputs * layer.outputs
            )
            rows.append(
                timing.Row(
                    f"{shape} {kind} x {count}", timings, work, timing.Limits(read, products)
                )
            )
        print(timing.table(rows), flush=True)
        timing.save(rows, arguments.json, read_bytes_s=read, int8_ops_s=products)


def _compare_formats(
    ops: Any, shape: str, arguments: Any, limits: timing.Limits, rounds: dict[str, Any]
) -> None:
    """One line for each format and number of rows."""
    outputs, inputs = SHAPES[shape]
    wanted = list(FORMATS) if arguments.formats == "all" else arguments.formats.split(",")
    plain = _copies(lambda: ops["linear"].pack(torch.randn(outputs, inputs).bfloat16()))
    pack = functools.partial(
        ops["quant_linear"].pack, dtype="bfloat16", activations=arguments.activations
    )
    print(
        "| format | bits | rows | us | bf16 us | GB/s | of the reads | GOP/s |\n" + "|---" * 8 + "|"
    )
    for name, count in itertools.product(wanted, map(int, arguments.rows.split(","))):
        weight = FORMATS[name].draw(outputs, inputs)
        each = _copies(functools.partial(pack, weight))
        x = torch.randn(count, inputs).bfloat16()
        calls = {
            "ours": timing.rotate([functools.partial(ops["quant_linear"], x, p) for p in each]),
            "bf16": timing.rotate([functools.partial(ops["linear"], x, p) for p in plain]),
        }
        timings = timing.compare(calls, **rounds)
        ours, bf16 = (timings[which].median for which in ("ours", "bf16"))
        num_bytes, cells = each[0].num_bytes, outputs * inputs
        rate = num_bytes / ours
        line = [
            f"{shape} {name}",
            f"{8 * num_bytes / cells:.2f}",
            f"{count}",
            f"{ours * 1e6:.4g}",
            f"{bf16 * 1e6:.4g}",
            f"{rate / 1e9:.1f}",
            f"{rate / limits.read_bytes_s:.0%}",
            f"{2 * count * cells / ours / 1e9:.0f}",
        ]
        print("| " + " | ".join(line) + " |", flush=True)
        row = timing.Row(f"{shape} {name} x {count}", timings, timing.Work(num_bytes), limits)
        timing.save([row], arguments.json, read_bytes_s=limits.read_bytes_s)


def _copies(pack: Callable[[], Any]) -> list[Any]:
    """As many packed weights as leave the caches."""
    once = pack()
    return [once] + [
        pack() for _ in range(timing.copies_beyond_caches(once.num_bytes, total=128 << 20) - 1)
    ]


class Layer:
    """One weight in all forms, each in as many copies as leave the caches."""

    def __init__(
        self, op: Any, outputs: int, inputs: int, bits: int, group: int | None, activations: str,
        *, with_torch: bool,
    ) -> None:  # fmt: skip
        self.outputs, self.inputs = outputs, inputs
        self.limbs = 1 if activations == "int8" else 2
        self.op = op
        half = 2 ** (bits - 1)
        self.values = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8)
        self.scales = (
            torch.rand(outputs, -(-inputs // (group or inputs))).add(0.5).bfloat16().float()
        )
        weight = QuantizedWeight(self.values, self.scales, bits=bits, group_size=group)
        once = op.pack(weight, "bfloat16", activations=activations)
        self.num_bytes = once.num_bytes
        copies = timing.copies_beyond_caches(self.num_bytes, total=128 << 20)
        self.packed = [once] + [
            op.pack(weight, "bfloat16", activations=activations) for _ in range(copies - 1)
        ]
        self.torch = self._torch(bits, group, activations) if with_torch else {}

    def calls(self, x: Tensor) -> dict[str, timing.Call]:
        ours = timing.rotate([lambda p=p: self.op(x, p) for p in self.packed])
        return {"ours": ours, **{name: make(x) for name, make in self.torch.items()}}

    def _torch(
        self, bits: int, group: int | None, activations: str
    ) -> dict[str, Callable[[Tensor], timing.Call]]:
        """Torch's forms of this weight."""
        copies = timing.copies_beyond_caches(2 * self.values.numel(), total=128 << 20, most=12)
        plain = [self.values.bfloat16() for _ in range(copies)]
        found = {
            "torch bf16": lambda x: timing.rotate(
                [lambda w=w: torch.nn.functional.linear(x, w) for w in plain]
            )
        }
        if activations == "int8":
            found["torch int8 dynamic"] = self._dynamic
        elif bits == 8:
            found["torch int8 weight-only"] = self._weight_only
        elif group is not None:
            found["torch int4 weight-only"] = lambda x: self._int4(x, group)
        return found

    def _dynamic(self, x: Tensor) -> timing.Call:
        torch.backends.quantized.engine = "x86"
        weight = torch.quantize_per_channel(
            self.values.float(),
            torch.ones(self.outputs).double(),
            torch.zeros(self.outputs).long(),
            0,
            torch.qint8,
        )
        packed = [torch.ops.quantized.linear_prepack(weight, None) for _ in range(len(self.packed))]
        wide = x.float()
        run = torch.ops.quantized.linear_dynamic
        return timing.rotate([lambda p=p: run(wide, p, False) for p in packed])

    def _weight_only(self, x: Tensor) -> timing.Call:
        scales = torch.ones(self.outputs).bfloat16()
        copies = [self.values.clone() for _ in range(len(self.packed))]
        return timing.rotate([lambda w=w: torch._weight_int8pack_mm(x, w, scales) for w in copies])

    def _int4(self, x: Tensor, group: int) -> timing.Call:
        codes = (self.values + 8).int()
        scales = torch.ones(self.inputs // group, self.outputs, 2).bfloat16()
        copies = [
            torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            for _ in range(len(self.packed))
        ]
        run = torch.ops.aten._weight_int4pack_mm_for_cpu
        return timing.rotate([lambda w=w: run(x, w, group, scales) for w in copies])


def _read_bytes_s() -> float:
    array = packed_buffer(512 << 20).view(torch.float32).fill_(1)
    return array.numel() * 4 / timing.compare({"sum": array.sum}, rounds=5)["sum"].best


def _int8_ops_s() -> float:
    x = torch.randint(-9, 9, (2048, 1024), dtype=torch.int8)
    weight = torch.randint(-9, 9, (6144, 1024), dtype=torch.int8).t()
    turned = weight.contiguous()
    calls = {
        "as is": lambda: torch._int_mm(x, weight),
        "turned": lambda: torch._int_mm(x, turned),
    }
    timings = timing.compare(calls, rounds=5)
    return 2 * 2048 * 1024 * 6144 / min(each.best for each in timings.values())


if __name__ == "__main__":
    main()
