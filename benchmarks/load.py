"""Load time and peak memory side by side: ``python benchmarks/load.py --help``.

Each engine is started offline with one checkpoint and asked for two tokens; what counts is the time from
the process's start to them, and the highest resident size of all of its processes. *cold*: the checkpoint's
files were put out of the system's file cache before (the machine below may still hold them); *warm*: they
are in it. All have the same key-value cache, written before it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peers
import render
from peers import CHECKPOINTS, Absent, Peers
from processes import Failed, Launch, Noise, Worker, peak_memory_mib

CACHE_GIB = 1
ENGINES = ("headrace", "vllm", "openvino", "llamacpp", "transformers")
STATES = ("cold", "warm")
PRECISION = "bf16"
BEGIN, END = "<!-- loading: begin -->", "<!-- loading: end -->"
ATTEMPTS = 3

EPILOG = """\
example:
  python benchmarks/checkpoints.py MODELS llama1b
  python benchmarks/load.py --models MODELS --peer vllm=VENV --peer openvino=VENV \\
      --peer llamacpp=VENV --also gguf-q8_0=MODELS/gguf/llama1b-q8_0.gguf \\
      --out load.jsonl --write docs/performance.md
"""


def put_out_of_cache(path: Path) -> None:
    """Have the system forget a checkpoint's bytes; they are clean, so it can."""
    if not hasattr(os, "posix_fadvise"):
        raise Failed("files can be put out of the file cache on Linux only: --states warm")
    for file in _files(path):
        with open(file, "rb") as content:
            os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def put_into_cache(path: Path) -> None:
    """Read a checkpoint's bytes once."""
    for file in _files(path):
        with open(file, "rb") as content:
            while content.read(16 << 20):
                pass


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in sorted(path.rglob("*")) if file.is_file()]


def weights_mib(path: Path) -> int:
    """Size of a checkpoint's largest kind of file."""
    sizes: dict[str, int] = {}
    for file in _files(path):
        sizes[file.suffix] = sizes.get(file.suffix, 0) + file.stat().st_size
    return max(sizes.values()) >> 20


class Comparison:
    """One run of this program.

    Args:
        launches: label -> how it is started, and its checkpoint.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        launches: Mapping[str, tuple[Launch, Path]],
        logs: Path,
    ) -> None:
        self._args, self._launches, self._logs = args, launches, logs
        self._out = Path(args.out)

    def run(self) -> None:
        """All rounds; within a round the labels follow each other, each round begins with another."""
        labels = list(self._launches)
        for number in range(self._args.rounds):
            shift = number % len(labels)
            for label in [*labels[shift:], *labels[:shift]]:
                for state in self._args.states:
                    self._visit(number, label, state)

    def _visit(self, number: int, label: str, state: str) -> None:
        where = f"{number} {self._args.model} {label} {state}"
        best: dict[str, Any] | None = None
        try:
            for _ in range(ATTEMPTS):
                result = self._measured(label, state)
                if best is None or result["others_pct"] < best["others_pct"]:
                    best = result
                if best["others_pct"] <= self._args.max_others:
                    break
        except Failed as error:
            print(f"{where}: FAILED: {error}", flush=True)
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "workload": "load", "round": number,
            "model": self._args.model, "engine": label, "state": state, **(best or {}),
        }  # fmt: skip
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = {key: line[key] for key in ("seconds", "peak_mib", "others_pct")}
        print(f"{where}: {shown}", flush=True)

    def _measured(self, label: str, state: str) -> dict[str, Any]:
        launch, path = self._launches[label]
        (put_out_of_cache if state == "cold" else put_into_cache)(path)
        noise, begin = Noise(), time.perf_counter()
        worker = Worker(launch, self._logs / f"{label}.log")  # returns with the first tokens
        try:
            return {
                "seconds": time.perf_counter() - begin,
                "peak_mib": round(peak_memory_mib(worker.process.pid)),
                "weights_mib": weights_mib(path),
                "version": worker.version,
                **noise.figures(),
            }
        finally:
            worker.close()


def launches(args: argparse.Namespace) -> dict[str, tuple[Launch, Path]]:
    """What is there of the engines, and headrace with the other checkpoints; what is not is said."""
    installed = Peers(peers.homes(args.peer), Path(args.models), args.threads)
    found = {}
    for engine in args.engines:
        try:
            path = installed.checkpoint(engine, args.model, PRECISION)
            launch = installed.worker_of(engine, path, PRECISION, cache_gib=CACHE_GIB)
        except Absent as reason:
            print(f"{engine}: left out: {reason}", flush=True)
            continue
        found[engine] = launch, path
    for entry in args.also:
        label, _, place = entry.partition("=")
        path = Path(place)
        if not path.exists():
            print(f"{label}: left out: {path} is not there", flush=True)
            continue
        launch = installed.worker_of("headrace", path, PRECISION, cache_gib=CACHE_GIB)
        found[f"headrace, {label}"] = launch, path
    return found


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the rounds, as Markdown."""
    titles = ("model", "engine", "files, MiB", "cold, s", "warm, s", "peak memory, MiB",
              "peak beyond files and cache, MiB", "version")  # fmt: skip
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model, engine in dict.fromkeys((x["model"], x["engine"]) for x in lines):
        here = [x for x in lines if (x["model"], x["engine"]) == (model, engine)]
        peak = max(x["peak_mib"] for x in here)
        files = here[-1]["weights_mib"]
        rows.append(
            f"| {model} | {engine} | {files} | {_shown(here, 'cold')} | {_shown(here, 'warm')} | {peak} "
            f"| {peak - files - (CACHE_GIB << 10)} | {here[-1]['version']} |"
        )
    rounds = 1 + max(x["round"] for x in lines)
    return (
        f"{lines[0]['time'][:10]}, {rounds} rounds, medians (least-most); {CACHE_GIB} GiB of cache.\n\n"
        + "\n".join(rows)
        + "\n"
    )


def _shown(lines: Sequence[Mapping[str, Any]], state: str) -> str:
    found = [x["seconds"] for x in lines if x["state"] == state]
    if not found:
        return ""
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def main() -> None:
    args = _arguments()
    logs = Path(tempfile.mkdtemp(prefix="headrace-load-"))
    print(f"results: {args.out}; logs of the engines: {logs}", flush=True)
    if not args.only_render:
        found = launches(args)
        if not found:
            sys.exit("nothing to measure: no engine has the model")
        Comparison(args, found, logs).run()
    text = table([x for x in render.read(Path(args.out)) if x["workload"] == "load"])
    print("\n" + text)
    if args.write:
        render.write(Path(args.write), text, (BEGIN, END))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--models", default=os.environ.get("HEADRACE_BENCH_MODELS", "models"), metavar="FOLDER")
    add("--model", default="llama1b", help="below that folder")
    add("--peer", action="append", default=[], metavar="NAME=FOLDER", help="virtual environments")
    add("--engines", type=lambda text: text.split(","), default=list(ENGINES), metavar="NAMES",
        help=f"of {', '.join(CHECKPOINTS)}")  # fmt: skip
    add("--also", action="append", default=[], metavar="LABEL=PATH",
        help="headrace with another checkpoint (GGUF, .bin, ...)")  # fmt: skip
    add("--states", type=lambda text: text.split(","), default=list(STATES), metavar="NAMES")
    add("--rounds", type=int, default=3, help="(default: 3)")
    add("--threads", type=int, default=os.cpu_count())
    add("--max-others", type=float, default=6.0, metavar="PERCENT")
    add("--out", default="load.jsonl", metavar="FILE")
    add("--only-render", action="store_true", help="the table of what is in the file")
    add("--write", metavar="FILE", help="put the table into this Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
