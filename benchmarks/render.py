"""Tables of a comparison: ``python benchmarks/render.py results.jsonl [--models FOLDER]``.

Reads the result lines that ``compare.py`` wrote, and the shapes of the checkpoints for the limits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peers import BLOCKS, PACKED

BEGIN, END = "<!-- comparison: begin -->", "<!-- comparison: end -->"
OURS = "headrace"
Line = Mapping[str, Any]
BITS: Mapping[str, float] = {"bf16": 16, "int8": 8, "int4": 4, **BLOCKS, **PACKED}
"""Precision -> bits of a weight that a decode step reads."""
HEAD_BITS: Mapping[str, float] = {
    **{precision: BLOCKS["q6_k"] for precision in BLOCKS if precision != "q8_0"},
    **dict.fromkeys(PACKED, 16),
}
"""The same of the head, which llama-quantize writes as Q6_K, and AWQ and GPTQ leave as it is."""


class Measure(NamedTuple):
    """A column of figures of a workload."""

    key: str
    unit: str
    higher_is_better: bool
    what: str


MEASURES: Mapping[str, Sequence[Measure]] = {
    "decode": [Measure("ms_per_token", "ms/token", False, "decode, 128 in, 128 out")],
    "prefill": [Measure("seconds", "s", False, "prefill of 2,048")],
    **{
        f"batch{n}": [Measure("output_tok_s", "output tok/s", True, f"decode of {n} together")]
        for n in (8, 32)
    },
    "mixed": [Measure("output_tok_s", "output tok/s", True, "64 mixed requests, offline")],
    "prefix": [Measure("seconds", "s", False, "32 requests sharing 1,024 tokens")],
    "memory": [Measure("peak_mib", "MiB", False, "peak memory, offline")],
    **{
        f"serve{n}": [
            Measure("output_tok_s", "output tok/s", True, f"serving at {n}"),
            Measure("ttft_p50_ms", "ms TTFT p50", False, f"serving at {n}"),
            Measure("ttft_p99_ms", "ms TTFT p99", False, f"serving at {n}"),
            Measure("tpot_p50_ms", "ms TPOT p50", False, f"serving at {n}"),
            Measure("itl_p50_ms", "ms ITL p50", False, f"serving at {n}"),
            Measure("itl_p99_ms", "ms ITL p99", False, f"serving at {n}"),
        ]
        for n in (1, 8, 32, 64)
    },
    "startup": [Measure("seconds", "s", False, "process start to first token")],
}


class Shape(NamedTuple):
    """What a checkpoint's tensors say of the work that a token is."""

    linear: int
    """Parameters of the layers' matrices."""
    head: int
    """Parameters of the matrix that makes logits."""
    cache_bytes: int
    """Keys and values of one token, 16 bits each."""
    attention_flops: int
    """For each pair of positions that attend to each other, all layers."""


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file; one that was cut off at its end is dropped."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def tables(lines: Sequence[Line], models: Path | None = None) -> str:
    """All tables, as Markdown. Quick looks are left out where there is anything better."""
    real = [line for line in lines if not line.get("quick")]
    if any(line["workload"] in MEASURES for line in real):
        lines = real
    parts = [_preamble(lines)]
    measured = [line for line in lines if line["workload"] in MEASURES]
    places = dict.fromkeys((line["model"], line["precision"]) for line in measured)
    for model, precision in places:
        here = [
            line
            for line in lines
            if (line.get("model"), line.get("precision")) == (model, precision)
        ]
        shape = shape_of(models / model) if models is not None else None
        parts.append(f"### {model}, {precision}\n\n{_table(here, precision, shape)}")
    gains = [_gains(measured, model) for model in dict.fromkeys(model for model, _ in places)]
    parts += [gain for gain in gains if gain]
    failures = {(x["engine"], x["model"], x["precision"], x["error"][:160])
                for x in lines if x["workload"] == "failure"}  # fmt: skip
    if failures:
        said = "\n".join(f"- {e} on {m}, {p}: {text}" for e, m, p, text in sorted(failures))
        parts.append(f"Not measured, because it failed:\n\n{said}")
    return "\n\n".join(parts) + "\n"


def write(path: Path, text: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the tables between the marks of a Markdown file, or at its end."""
    begin, end = marks
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    block = f"{begin}\n{text}{end}"
    if begin in content and end in content:
        before, after = content.split(begin, 1)[0], content.split(end, 1)[1]
        content = before + block + after
    else:
        content = content.rstrip() + ("\n\n" if content.strip() else "") + block + "\n"
    path.write_text(content, encoding="utf-8")


def shape_of(folder: Path) -> Shape | None:
    """Counted from the headers of a folder's safetensors files; None if there is none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").is_file():
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    linear = head = embedding = 0
    for file in files:
        with file.open("rb") as data:
            header = json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        for name, tensor in header.items():
            if name == "__metadata__" or len(tensor["shape"]) != 2:
                continue
            count = tensor["shape"][0] * tensor["shape"][1]
            if "embed_tokens" in name:
                embedding += count
            elif "lm_head" in name:
                head += count
            else:
                linear += count
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // heads
    cache = 2 * 2 * layers * config["num_key_value_heads"] * dim
    return Shape(linear, head or embedding, cache, 4 * layers * heads * dim)


def limit(workload: str, precision: str, shape: Shape, machine: Line) -> float | None:
    """The figure that the machine's limits would allow, for workloads that have such a limit.

    Decoding reads every weight once a token, at the nominal bits, and the cache of 192 tokens on average.
    Prefill multiplies 2,048 rows with every matrix of the layers, and attends causally in bf16.
    """
    if workload == "decode":
        bits, head_bits = BITS[precision], HEAD_BITS.get(precision, BITS[precision])
        num_bytes = (bits * shape.linear + head_bits * shape.head) / 8 + 192 * shape.cache_bytes
        return float(1e3 * num_bytes / (machine["read_gb_s"] * 1e9))
    if workload == "prefill":
        speed = machine["bf16_gflop_s"] if precision != "int8" else machine["int8_gop_s"]
        attention = shape.attention_flops * 2048 * 2049 / 2 / machine["bf16_gflop_s"]
        return float((2 * shape.linear * 2048 / speed + attention) / 1e9)
    return None


def _table(lines: Sequence[Line], precision: str, shape: Shape | None) -> str:
    engines = _engines(lines)
    rows = [["workload", "unit", *engines, "headrace is", "of the limit"]]
    rows.append(["---"] * len(rows[0]))
    for workload, measures in MEASURES.items():
        of_workload = [line for line in lines if line["workload"] == workload]
        for measure in measures if of_workload else ():
            values = {e: _values(of_workload, e, measure.key) for e in engines}
            share = _share(workload, precision, shape, lines, values)
            rows.append([measure.what, measure.unit, *(_shown(values[e]) for e in engines),
                         _ratio(values, measure), share])  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _gains(lines: Sequence[Line], model: str) -> str:
    """What fewer bits bring us: our own figures against our own in bf16."""
    ours = [line for line in lines if line["model"] == model and line["engine"] == OURS]
    said = []
    for precision in dict.fromkeys(
        line["precision"] for line in ours if line["precision"] != "bf16"
    ):
        for workload, (measure, *_) in MEASURES.items():
            both = [
                [
                    x[measure.key]
                    for x in ours
                    if (x["workload"], x["precision"]) == (workload, each)
                ]
                for each in (precision, "bf16")
            ]
            if all(both):
                few, full = map(statistics.median, both)
                gain = few / full if measure.higher_is_better else full / few
                said.append(f"{precision} {workload} {gain:.2f}x")
    return f"headrace on {model} against its own bf16: {', '.join(said)}." if said else ""


def _engines(lines: Iterable[Line]) -> list[str]:
    """Ours first, then the others in the order of their first result."""
    found = dict.fromkeys(line["engine"] for line in lines if line["workload"] in MEASURES)
    return sorted(found, key=lambda engine: engine != OURS)


def _values(lines: Iterable[Line], engine: str, key: str) -> list[float]:
    return [line[key] for line in lines if line["engine"] == engine and key in line]


def _shown(values: Sequence[float]) -> str:
    if not values:
        return "-"
    middle = _short(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({_short(min(values))}-{_short(max(values))})"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(values: Mapping[str, Sequence[float]], measure: Measure) -> str:
    """How many times as good as the best other engine: above 1 is better."""
    ours = values.get(OURS)
    others = {e: statistics.median(v) for e, v in values.items() if e != OURS and v}
    if not ours or not others:
        return "-"
    mine = statistics.median(ours)
    best = (max if measure.higher_is_better else min)(others, key=lambda engine: others[engine])
    ratio = mine / others[best] if measure.higher_is_better else others[best] / mine
    return f"**{ratio:.2f}x** {best}"


def _share(
    workload: str,
    precision: str,
    shape: Shape | None,
    lines: Sequence[Line],
    values: Mapping[str, Sequence[float]],
) -> str:
    """Our median against the median of the rounds' limits.

    Where neighbours share the memory, its rate differs by a factor of two within minutes: medians are
    compared with medians. An engine that was faster than the limit has moved it.
    """
    machines = [line for line in lines if line["workload"] == "limits"]
    if shape is None or not machines or not values.get(OURS):
        return "-"
    limits = [limit(workload, precision, shape, machine) for machine in machines]
    known = [value for value in limits if value is not None]
    if not known:
        return "-"
    reached = [statistics.median(each) for each in values.values() if each]
    return f"{min(statistics.median(known), *reached) / statistics.median(values[OURS]):.0%}"


def _preamble(lines: Sequence[Line]) -> str:
    """Machine, date, versions, limits, noise."""
    machine = next((line for line in lines if line["workload"] == "machine"), {})
    times = [line["time"] for line in lines]
    rounds = 1 + max((line["round"] for line in lines if "round" in line), default=0)
    hardware = [f"{machine.get('cpu', '?')}, {machine.get('num_cpus', '?')} cores"]
    hardware.append(f"{machine.get('memory_gib', '?')} GiB; {min(times)[:10]}")
    parts = [
        f"{', '.join(hardware)}; medians of {rounds} rounds, engines in turn (lowest-highest)."
    ]
    if any(line.get("quick") for line in lines):
        parts.append(
            "**A quick look with short workloads: it shows that the programs run, not how fast.**"
        )
    limits = [line for line in lines if line["workload"] == "limits"]
    if limits:
        parts.append(_limits_line(limits))
    versions = dict.fromkeys((x["engine"], x["version"]) for x in lines if x.get("version"))
    if versions:
        parts.append("Versions: " + ", ".join(f"{e} {v}" for e, v in versions) + ".")
    others = [line["others_pct"] for line in lines if "others_pct" in line]
    steal = [line["steal_pct"] for line in lines if "steal_pct" in line]
    if others:
        parts.append(f"Meanwhile others took {statistics.median(others):.1f} % of the machine in the median, "
                     f"{max(others):.1f} % at most; the host withheld {statistics.median(steal):.1f} %, "
                     f"{max(steal):.1f} % at most.")  # fmt: skip
    return "\n".join(parts)


def _limits_line(limits: Sequence[Line]) -> str:
    def shown(key: str) -> str:
        return _shown([line[key] for line in limits])

    best = max(limits, key=lambda line: line["read_gb_s"])
    return (
        f"Limits in the same run: reads {shown('read_gb_s')} GB/s (best: {best['read_method']}), products "
        f"{shown('bf16_gflop_s')} GFLOP/s in bf16, {shown('fp32_gflop_s')} in fp32, {shown('int8_gop_s')} "
        "GOP/s in int8."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", help="result lines of compare.py")
    parser.add_argument(
        "--models", metavar="FOLDER", help="the checkpoints, for shares of the limits"
    )
    parser.add_argument("--write", metavar="FILE", help="put the tables into this Markdown file")
    args = parser.parse_args()
    text = tables(read(Path(args.file)), Path(args.models) if args.models else None)
    print(text)
    if args.write:
        write(Path(args.write), text)


if __name__ == "__main__":
    main()
