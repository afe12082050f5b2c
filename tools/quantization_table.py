"""Write the table of formats into ``docs/quantization.md``: ``python tools/quantization_table.py``.

Rows are the installed methods of ``headrace.quantization``; a test compares. ``--measure MODEL`` first writes
``quantization_figures.json``: errors of the demo model, and tokens a second of MODEL.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core import plugins
from headrace_core.errors import HeadraceError
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_quant.refused import RefusedMethod

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quantization.md"
FIGURES = Path(__file__).with_name("quantization_figures.json")
BEGIN, END = "<!-- formats: begin -->", "<!-- formats: end -->"
SPEC = LinearSpec("model.layers.0.mlp.up_proj", 1024, (1024,), "bfloat16")
NEW_TOKENS, ROUNDS = 64, 3
COLUMNS = (
    "method", "rounds any checkpoint", "activations", "CPU", "GPU", "MiB", "logit error", "divergence",
    "tokens/s",
)  # fmt: skip
MEASURED = ("weights_mib", "logit_error", "divergence", "tokens_s")


class Row(NamedTuple):
    """A method under all of its names."""

    names: tuple[str, ...]
    rounds: bool
    """Any checkpoint, while it is loaded."""
    activations: str
    """Of the method's layers: ``as they are`` (exact), or ``int8``."""


def rows() -> list[Row]:
    """One for each class of the registry."""
    ops = bind_ops(KernelNeed(device="cpu", dtype="bfloat16"), choose={"*": "reference"})
    by_class: dict[type[QuantMethod], list[str]] = {}
    for name, plugin in sorted(plugins.installed("headrace.quantization").items()):
        by_class.setdefault(plugin.load(), []).append(name)
    found = []
    for kind, names in by_class.items():
        if issubclass(kind, RefusedMethod):
            continue
        names.sort(key=lambda name, own=kind.name: name != own)  # type: ignore[misc]
        found.append(_row(kind, tuple(names), ops))
    return sorted(found, key=lambda row: row.names)


def _row(kind: type[QuantMethod], names: tuple[str, ...], ops: OpTable) -> Row:
    try:
        layer = kind.from_config(None, ops).for_layer(SPEC)
    except HeadraceError:
        return Row(names, rounds=False, activations="as the file says, or as they are")
    exact = getattr(layer, "activations", "float") == "float"
    return Row(names, rounds=kind.name != "none", activations="as they are" if exact else "int8")


def table() -> str:
    """The whole text between the marks."""
    figures: Mapping[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    lines = [
        "Made by `python tools/quantization_table.py` of the installed methods; figures of",
        f"{figures['date']}, {figures['machine']}. MiB, error and divergence are those of the demo model,",
        "against float32; tokens a second are one request's, of the shape of",
        f"{figures['model']} with random weights: medians of {ROUNDS} rounds, methods in turn.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|" + "---|" * len(COLUMNS),
    ]
    for row in rows():
        own = figures["methods"].get(row.names[0], {})
        cells = [
            ", ".join(f"`{name}`" for name in row.names),
            "yes" if row.rounds else "-",
            row.activations,
            "native",
            "Triton, not run",
            *(str(own.get(key, "-")) for key in MEASURED),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table as it is now."""
    before, rest = text.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{table()}{END}{rest.split(END, 1)[1]}"


def measure(model: Path) -> None:
    """Measure every method that rounds any checkpoint, in turns, and keep the figures."""
    names = ["none", *(row.names[0] for row in rows() if row.rounds)]
    names = [name for name in names if name != "experts_int8"]  # has nothing to round here
    lines = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "quant_accuracy.py"), "--methods", ",".join(names)],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    found = [json.loads(line) for line in lines if line.startswith("{")]
    methods = {line["method"]: {key: line[key] for key in MEASURED[:3]} for line in found}
    speeds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            words = [sys.executable, __file__, "--speed", str(model), name]
            done = subprocess.run(words, capture_output=True, text=True, check=True)
            speeds[name].append(float(done.stdout.splitlines()[-1]))
            print(name, speeds[name], flush=True)
    for name, each in speeds.items():
        methods[name]["tokens_s"] = round(statistics.median(each), 1)
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.split(":")[1].strip() for line in facts if line.startswith("model name")]
    cpu = models[0] if models else platform.processor()
    figures = {"date": str(date.today()), "machine": cpu, "model": model.name, "methods": methods}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def speed(model: str, method: str) -> float:
    """Tokens a second of one request, the first token left out."""
    from headrace import LLM, SamplingParams

    with LLM(
        model, quantization=None if method == "none" else method, dtype="bfloat16", max_model_len=512,
        skip_tokenizer_init=True, use_tqdm_on_load=False,
    ) as llm:  # fmt: skip

        def seconds(count: int) -> float:
            params = SamplingParams(
                max_tokens=count, ignore_eos=True, temperature=0, detokenize=False
            )
            start = time.perf_counter()
            llm.generate({"prompt_token_ids": list(range(10, 74))}, params, use_tqdm=False)
            return time.perf_counter() - start

        seconds(NEW_TOKENS)
        return (NEW_TOKENS - 1) / (seconds(NEW_TOKENS) - seconds(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--measure", type=Path, metavar="MODEL", help="a checkpoint in floats")
    parser.add_argument("--speed", nargs=2, metavar=("MODEL", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.speed:
        print(speed(*args.speed))
        return
    if args.measure:
        measure(args.measure)
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
