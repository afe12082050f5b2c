"""``headrace bench``: find the benchmark, import only its module, run it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from headrace.suggestions import near_names

BENCHMARKS = {
    "serve": "Load on a running server: throughput, TTFT, TPOT, ITL, end-to-end latency.",
    "latency": "Latency of one offline batch, measured repeatedly.",
    "throughput": "Tokens per second of many offline requests at once.",
    "startup": "Time from process start to first token, with and without caches, as a timeline.",
    "scaling": "Decoding and a prompt with 1, 2, 4, ... threads, beside what a model of scaling predicts.",
    "sweep": "Any of these over a grid of settings, with resume, tables and plots.",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *rest = argv
    if name not in BENCHMARKS:
        near = near_names(name, BENCHMARKS, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print("hint: headrace bench --help lists them (docs/errors/HR-CFG-002.md)", file=sys.stderr)
        print(f"headrace bench: HR-CFG-002: unknown benchmark {name!r}.{meant}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(f"headrace.bench.{name}").main(rest)
    return status


def usage() -> str:
    """The text of ``headrace bench --help``."""
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {text}" for name, text in BENCHMARKS.items()]
    return "\n".join(
        [
            "usage: headrace bench <benchmark> [flags]     (headrace bench <benchmark> --help for its flags)",
            "",
            *lines,
            "",
            "Start here (the demo model, no download):",
            "  headrace bench latency --num-iters 5           one batch of 8, offline",
            "  headrace bench throughput --num-prompts 50     50 requests, offline",
            "  headrace bench startup                         how long until the first token?",
            "  headrace bench scaling                         what do more threads give, and should they?",
            "  headrace serve & headrace bench serve --num-prompts 50 --random-input-len 64",
        ]
    )
