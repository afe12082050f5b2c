"""Embedding throughput side by side: ``python benchmarks/embed.py --help``.

1,000 texts of about 16 to 256 tokens through one embedding model. Engines run one at a time, in turn, for
several rounds; the texts are new in each round and the same for all. The vectors of the first texts are
compared with headrace's, so that nobody is fast by being wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers
import render
from driven.embed_worker import SHOWN
from peers import Absent, Peers
from processes import Failed, Launch, Noise, last_words, peak_memory_mib, stop

DRIVEN = Path(__file__).parent / "driven"
ENGINES = ("headrace", "sentence-transformers", "vllm", "openvino")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
BATCH = 32
"""Of the engines that must be told; the best of 16, 32 and 64 here for each of them."""
BEGIN, END = "<!-- embeddings: begin -->", "<!-- embeddings: end -->"
ATTEMPTS = 3

EPILOG = """\
example:
  python benchmarks/embed.py --models MODELS --peer sentence-transformers=VENV --peer vllm=VENV \\
      --peer openvino=VENV --out embed.jsonl --write docs/performance.md
"""


def texts(count: int, seed: object) -> list[str]:
    """Runs of 12 to 200 words of Python's own documentation."""
    topics: Mapping[str, str] = pydoc_data.topics.topics
    words = re.findall(r"[A-Za-z]{2,10}", " ".join(v for _, v in sorted(topics.items())))
    draw = random.Random(repr(seed))
    found = []
    for _ in range(count):
        length, at = draw.randint(12, 200), draw.randrange(len(words) - 300)
        found.append(" ".join(words[at : at + length]))
    return found


class Answer(NamedTuple):
    """One run of an engine."""

    seconds: float
    vectors: list[list[float]]


class Embedder:
    """An engine behind ``embed_worker.py``."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._log = log
        self.process = launch.start(log, stdin=-1, stdout=-1)
        try:
            self.version: str = self._read()["version"]
        except Failed:
            stop(self.process)
            raise

    def run(self, lines: list[str]) -> Answer:
        """Embed the texts.

        Raises:
            Failed: the engine ended, or gave another number of vectors.
        """
        assert self.process.stdin is not None
        print(json.dumps({"texts": lines}), file=self.process.stdin, flush=True)
        answer = self._read()
        if answer["count"] != len(lines):
            raise Failed(f"{answer['count']} vectors of {len(lines)} texts")
        return Answer(answer["seconds"], answer["vectors"])

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        stop(self.process)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise Failed(f"it ended with status {self.process.wait()}: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def launch(installed: Peers, engine: str, model: str, precision: str) -> Launch:
    """How an engine is started with the settings that it is best with.

    Raises:
        Absent: it, or its checkpoint, is not there.
    """
    path = installed.models / (f"{model}-ov-fp16" if engine == "openvino" else model)
    if not path.is_dir():
        raise Absent(f"{path} is not there")
    settings = json.dumps({"model": str(path), "dtype": DTYPES[precision], "batch": BATCH})
    words = [installed.python(engine), str(DRIVEN / "embed_worker.py"), engine, settings]
    return Launch(words, installed.environment(engine), peers.unset(engine))


class Comparison:
    """One run of this program."""

    def __init__(self, args: argparse.Namespace, installed: Peers, logs: Path) -> None:
        self._args, self._peers, self._logs = args, installed, logs
        self._out = Path(args.out)
        self._ours: dict[tuple[int, str], list[list[float]]] = {}

    def run(self) -> None:
        """All rounds; within a round and precision, all engines follow each other."""
        engines = self._args.engines
        for number in range(self._args.rounds):
            for precision in self._args.precision:
                shift = number % len(engines)
                order = [*engines[shift:], *engines[:shift]]
                order.sort(key=lambda engine: engine != "headrace")  # others are held against it
                for engine in order:
                    self._visit(number, precision, engine)

    def _visit(self, number: int, precision: str, engine: str) -> None:
        where = f"{number} {self._args.model} {precision} {engine}"
        try:
            started = launch(self._peers, engine, self._args.model, precision)
            worker = Embedder(started, self._logs / f"{engine}-{precision}.log")
        except (Absent, Failed) as reason:
            print(f"{where}: left out: {reason}", flush=True)
            return
        try:
            line = self._measured(worker, number, precision, engine)
        except Failed as error:
            print(f"{where}: FAILED: {error}", flush=True)
            return
        finally:
            worker.close()
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = {k: line[k] for k in ("texts_s", "cosine", "peak_mib", "others_pct")}
        print(f"{where}: {shown}", flush=True)

    def _measured(
        self, worker: Embedder, number: int, precision: str, engine: str
    ) -> dict[str, Any]:
        count, best = self._args.texts, None
        for attempt in range(ATTEMPTS):
            worker.run(texts(max(32, count // 10), (self._args.seed, number, "warm", attempt)))
            noise = Noise()
            # The first texts are the same in every attempt: their vectors are compared.
            lines = [*texts(SHOWN, (self._args.seed, number)),
                     *texts(count - SHOWN, (self._args.seed, number, attempt))]  # fmt: skip
            answer = worker.run(lines)
            result = {"texts_s": count / answer.seconds, "seconds": answer.seconds,
                      **noise.figures()}  # fmt: skip
            if best is None or result["others_pct"] < best["others_pct"]:
                best = result
            if best["others_pct"] <= self._args.max_others:
                break
        assert best is not None
        key = (number, precision)
        self._ours.setdefault(key, answer.vectors)
        return {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "workload": "embed", "round": number,
            "model": self._args.model, "precision": precision, "engine": engine, **best,
            "cosine": least_cosine(self._ours[key], answer.vectors), "version": worker.version,
            "peak_mib": round(peak_memory_mib(worker.process.pid)),
        }  # fmt: skip


def least_cosine(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The worst agreement of two lists of vectors."""
    return min(_cosine(a, b) for a, b in zip(ours, theirs, strict=True))


def _cosine(a: Sequence[float], b: Sequence[float]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / (sum(x * x for x in a) * sum(y * y for y in b)) ** 0.5


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Medians over the rounds, as Markdown."""
    titles = ("model, precision", "engine", "texts/s (least-most)", "headrace's ratio",
              "worst cosine with headrace", "peak memory", "version")  # fmt: skip
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for model, precision in dict.fromkeys((x["model"], x["precision"]) for x in lines):
        here = [x for x in lines if (x["model"], x["precision"]) == (model, precision)]
        rates = {e: [x["texts_s"] for x in here if x["engine"] == e] for e in ENGINES}
        ours = statistics.median(rates["headrace"]) if rates["headrace"] else None
        for engine, found in rates.items():
            if not found:
                continue
            middle = statistics.median(found)
            last = [x for x in here if x["engine"] == engine][-1]
            ratio = "" if ours is None or engine == "headrace" else f"{ours / middle:.2f}x"
            cosine = min(x["cosine"] for x in here if x["engine"] == engine)
            rows.append(
                f"| {model}, {precision} | {engine} | {middle:.1f} ({min(found):.1f}-{max(found):.1f}) "
                f"| {ratio} | {cosine:.6f} | {last['peak_mib']} MiB | {last['version']} |"
            )
    rounds = 1 + max(x["round"] for x in lines)
    return f"{lines[0]['time'][:10]}, {rounds} rounds.\n\n" + "\n".join(rows) + "\n"


def main() -> None:
    args = _arguments()
    installed = Peers(peers.homes(args.peer), Path(args.models), args.threads)
    logs = Path(tempfile.mkdtemp(prefix="headrace-embed-"))
    print(f"results: {args.out}; logs of the engines: {logs}", flush=True)
    if not args.only_render:
        Comparison(args, installed, logs).run()
    text = table([x for x in render.read(Path(args.out)) if x["workload"] == "embed"])
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
    add("--model", default="minilm", help="below that folder; NAME-ov-fp16 for OpenVINO")
    add("--peer", action="append", default=[], metavar="NAME=FOLDER", help="virtual environments")
    add("--engines", type=lambda text: text.split(","), default=list(ENGINES), metavar="NAMES")
    add("--precision", type=lambda text: text.split(","), default=list(DTYPES), metavar="NAMES")
    add("--texts", type=int, default=1000, help="(default: 1000)")
    add("--rounds", type=int, default=3, help="(default: 3)")
    add("--threads", type=int, default=os.cpu_count())
    add("--seed", type=int, default=0)
    add("--max-others", type=float, default=6.0, metavar="PERCENT")
    add("--out", default="embed.jsonl", metavar="FILE")
    add("--only-render", action="store_true", help="the table of what is in the file")
    add("--write", metavar="FILE", help="put the table into this Markdown file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
