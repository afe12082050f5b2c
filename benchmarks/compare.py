"""Rerun the whole comparison and write its tables: ``python benchmarks/compare.py --help``.

Engines run one at a time, in turn, for several rounds; each result is a line of JSON in ``--out`` as soon as
it is there. Run again with the same file, it goes on where it stopped. ``render.py`` makes the tables.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers
import render
from driven.workloads import OFFLINE, SERVING
from peers import Absent, Peers
from processes import (
    Failed,
    Noise,
    Worker,
    free_port,
    peak_memory_mib,
    serving,
    stop,
    wait_for_token,
)

HERE = Path(__file__).parent
QUICK_SCALE = 0.125
ATTEMPTS = 3
"""Most runs of one measurement that others disturb; the quietest is kept."""

EPILOG = """\
examples:
  # everything: hours
  python benchmarks/compare.py --models MODELS --peer vllm=VENV --peer openvino=VENV --peer llamacpp=BIN \\
      --peer transformers=VENV --out results.jsonl --write docs/performance.md
  # does every adapter work? minutes, short lengths, one round; no figure of it means anything
  python benchmarks/compare.py --models MODELS --peer vllm=VENV --model tiny --quick --out quick.jsonl
  # one question
  python benchmarks/compare.py --models MODELS --model qwen06 --precision bf16 --only decode,prefill \\
      --engines headrace,llamacpp --rounds 1
  # is this tree slower than the one before it?
  python benchmarks/compare.py --models MODELS --peer headrace-before=VENV --engines headrace,headrace-before
  # the tables again, without measuring
  python benchmarks/render.py results.jsonl --write docs/performance.md
"""


class Row(NamedTuple):
    """A line of the comparison: what is measured on which models."""

    workload: str
    models: tuple[str, ...]
    precisions: tuple[str, ...]


BOTH = ("qwen06", "llama1b")
PLAN = (
    Row("decode", BOTH, ("bf16", "int8", "int4", *peers.BLOCKS, *peers.PACKED)),
    Row("prefill", BOTH, ("bf16", "int8", *peers.BLOCKS, *peers.PACKED)),
    Row("batch8", BOTH, ("bf16", "int8", "int4", *peers.BLOCKS, *peers.PACKED)),
    Row("batch32", BOTH, ("bf16", "int8", "int4", *peers.BLOCKS, *peers.PACKED)),
    Row("mixed", (*BOTH, "tiny"), ("bf16", "int8")),
    Row("prefix", BOTH, ("bf16",)),
    Row("memory", BOTH, ("bf16",)),
    Row("serve1", BOTH, ("bf16",)),
    Row("serve8", BOTH, ("bf16",)),
    Row("serve32", BOTH, ("bf16",)),
    Row("serve64", ("tiny",), ("bf16",)),
    Row("startup", ("tiny",), ("bf16",)),
)
WORKLOADS = tuple(row.workload for row in PLAN)


class Key(NamedTuple):
    """What makes a result unique in a file."""

    round: int
    model: str
    precision: str
    engine: str
    workload: str


class Visit(NamedTuple):
    """One engine on one model, in one round, and what is still to be measured of it."""

    round: int
    model: str
    precision: str
    engine: str
    workloads: tuple[str, ...]

    def key(self, workload: str) -> Key:
        """The key of one of its results."""
        return Key(self.round, self.model, self.precision, self.engine, workload)


class Comparison:
    """One run of this program."""

    def __init__(self, args: argparse.Namespace, installed: Peers, logs: Path) -> None:
        self._args, self._peers, self._logs = args, installed, logs
        self._out = Path(args.out)
        self._done = (
            keys_of(render.read(self._out), quick=args.quick) if self._out.is_file() else set()
        )
        self._scale = QUICK_SCALE if args.quick else 1.0

    def run(self) -> None:
        """Measure whatever is not in the file yet."""
        self._record({"workload": "machine", **_machine()})
        for visit in self._visits():
            self._say(visit, f"{', '.join(visit.workloads)} ...")
            try:
                self._visit(visit)
            except Absent as reason:
                self._say(visit, f"left out: {reason}")
            except (Failed, subprocess.SubprocessError) as error:
                self._say(visit, f"FAILED: {error}")
                self._record({**visit._asdict(), "workload": "failure", "error": str(error)})

    def _visits(self) -> Iterator[Visit]:
        """Round by round; within a round, all engines of a model and precision follow each other."""
        args = self._args
        for number in range(args.rounds):
            for model in args.model:
                for precision in args.precision:
                    wanted = [r.workload for r in PLAN if r.workload in args.only
                              and model in r.models and precision in r.precisions]  # fmt: skip
                    visits = list(self._visits_of(number, model, precision, wanted))
                    if visits and not args.no_limits:
                        self._measure_limits(number, model, precision)
                    yield from visits

    def _visits_of(
        self, number: int, model: str, precision: str, wanted: Sequence[str]
    ) -> Iterator[Visit]:
        # Each round begins with another engine: none is always the one after the pause.
        shift = number % len(self._args.engines)
        for engine in [*self._args.engines[shift:], *self._args.engines[:shift]]:
            able = [w for w in wanted if w in able_to(engine)]
            left = tuple(
                w for w in able if Key(number, model, precision, engine, w) not in self._done
            )
            if left:
                yield Visit(number, model, precision, engine, left)

    def _visit(self, visit: Visit) -> None:
        if visit.engine == "llama-bench":
            self._llama_bench(visit)
            return
        offline = [w for w in visit.workloads if w in OFFLINE]
        memory = "memory" in visit.workloads
        online = [w for w in visit.workloads if w in SERVING]
        if visit.engine == "llamacpp" and (offline or online or memory):
            self._by_server(visit, offline, online, memory)  # it has no other way in
        else:
            if offline or memory:
                self._by_worker(visit, offline, memory)
            if online:
                self._by_server(visit, [], online, memory=False)
        if "startup" in visit.workloads:
            self._startup(visit)

    def _by_worker(self, visit: Visit, workloads: Sequence[str], memory: bool) -> None:
        launch = self._peers.worker(
            visit.engine, visit.model, visit.precision, cache_gib=self._args.cache_gib
        )
        worker = Worker(launch, self._log(visit))
        try:
            self._offline(visit, worker, workloads)
            if memory:
                self._memory(visit, worker, worker.process.pid)
        finally:
            worker.close()

    def _by_server(
        self, visit: Visit, offline: Sequence[str], online: Sequence[str], memory: bool
    ) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        launch = self._peers.server(visit.engine, visit.model, visit.precision, port)
        with serving(launch, url, self._log(visit)) as pid:
            if offline or memory:
                version = self._peers.version(visit.engine)
                worker = Worker(self._peers.client_worker(url, version), self._log(visit))
                try:
                    self._offline(visit, worker, offline)
                    if memory:
                        self._memory(visit, worker, pid)
                finally:
                    worker.close()
            for workload in online:
                self._online(visit, workload, url, pid)

    def _offline(self, visit: Visit, worker: Worker, workloads: Sequence[str]) -> None:
        def once(workload: str, attempt: int) -> dict[str, float]:
            return worker.run(workload, self._salt(visit.round, attempt), self._scale)

        for workload in workloads:
            warm = min(self._scale, 0.25)  # shapes, pools, compiled code
            worker.run(workload, self._salt(visit.round, "warm"), warm)
            run = functools.partial(once, workload)
            self._measured(visit, workload, run, version=worker.version)

    def _memory(self, visit: Visit, worker: Worker, pid: int) -> None:
        """After the workload that fills the cache most; transformers has no cache to fill."""
        if "mixed" not in visit.workloads and visit.engine != "transformers":
            worker.run("mixed", self._salt(visit.round, "memory"), self._scale)
        self._record({**visit.key("memory")._asdict(), "peak_mib": peak_memory_mib(pid),
                      "version": worker.version, "quick": self._args.quick})  # fmt: skip

    def _online(self, visit: Visit, workload: str, url: str, pid: int) -> None:
        def drive(attempt: int) -> dict[str, float]:
            return self._drive(workload, url, self._salt(visit.round, attempt), self._scale)

        self._drive(workload, url, self._salt(visit.round, "warm"), min(self._scale, 0.125))
        self._measured(visit, workload, drive, peak_mib=lambda: peak_memory_mib(pid))

    def _drive(self, workload: str, url: str, seed: int, scale: float) -> dict[str, float]:
        load = SERVING[workload]
        count = max(load.concurrency, round(load.num_requests * (scale if scale < 1 else 1)))
        with tempfile.TemporaryDirectory() as folder:
            words = [
                *peers.client(), "--base-url", url, "--max-concurrency", str(load.concurrency),
                "--num-prompts", str(count), "--seed", str(seed), "--ignore-eos", "--temperature", "0",
                "--random-input-len", str(max(2, round(load.input_len * scale))),
                "--random-output-len", str(max(2, round(load.output_len * scale))),
                "--metric-percentiles", "99", "--disable-tqdm", "--save-result",
                "--result-dir", folder, "--result-filename", "result.json",
            ]  # fmt: skip
            done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
            if done.returncode != 0:
                raise Failed(f"the client ended with {done.returncode}: {done.stderr[-500:]}")
            result = json.loads((Path(folder) / "result.json").read_text())
        if result["failed"]:
            raise Failed(f"{result['failed']} requests failed: {result['errors'][:2]}")
        return {
            "output_tok_s": result["output_throughput"],
            "ttft_p50_ms": result["median_ttft_ms"],
            "ttft_p99_ms": result["p99_ttft_ms"],
            "tpot_p50_ms": result["median_tpot_ms"],
            "itl_p50_ms": result["median_itl_ms"],
            "itl_p99_ms": result["p99_itl_ms"],
        }

    def _startup(self, visit: Visit) -> None:
        """Process start to the first token of a completion, files in the page cache."""

        def once(_: object) -> dict[str, float]:
            port = free_port()
            launch = self._peers.server(
                visit.engine, visit.model, visit.precision, port, lasting=False
            )
            start = time.perf_counter()
            process = launch.start(self._log(visit))
            try:
                wait_for_token(process, f"http://127.0.0.1:{port}", self._log(visit), 600)
                return {"seconds": time.perf_counter() - start}
            finally:
                stop(process)

        once("warm")
        self._measured(visit, "startup", once)

    def _llama_bench(self, visit: Visit) -> None:
        for workload in visit.workloads:
            prompt, output = (2048, 0) if workload == "prefill" else (0, 128)
            sizes = round(prompt * self._scale), round(output * self._scale)
            words = self._peers.llama_bench(visit.model, visit.precision, *sizes)

            def once(
                _: object, words: list[str] = words, workload: str = workload
            ) -> dict[str, float]:
                done = subprocess.run(words, capture_output=True, text=True, timeout=1200)
                if done.returncode != 0:
                    raise Failed(done.stderr[-500:])
                [result] = json.loads(done.stdout)
                if workload == "prefill":
                    return {"seconds": result["n_prompt"] / result["avg_ts"]}
                return {"ms_per_token": 1e3 / result["avg_ts"]}

            self._measured(visit, workload, once, version=self._peers.version("llama-bench"))

    def _measured(
        self,
        visit: Visit,
        workload: str,
        once: Callable[[int], dict[str, float]],
        *,
        version: str = "",
        peak_mib: Callable[[], float] | None = None,
    ) -> None:
        """Run until others leave the machine alone, a few times at most; record the quietest run."""
        best: dict[str, Any] | None = None
        for attempt in range(1 if self._args.quick else ATTEMPTS):
            noise = Noise()
            figures = once(attempt)
            result = {**figures, **noise.figures()}
            if best is None or result["others_pct"] < best["others_pct"]:
                best = result
            if best["others_pct"] <= self._args.max_others:
                break
        assert best is not None
        if peak_mib is not None:
            best["peak_mib"] = peak_mib()
        if version:
            best["version"] = version
        self._record({**visit.key(workload)._asdict(), **best, "quick": self._args.quick})
        shown = ", ".join(f"{k} {v:.4g}" for k, v in best.items() if isinstance(v, (int, float)))
        self._say(visit, f"{workload}: {shown}")

    def _measure_limits(self, number: int, model: str, precision: str) -> None:
        """In a process of its own: no engine's thread pool stands in the way."""
        quick = self._args.quick
        words = [sys.executable, str(HERE / "limits.py"), *(["--quick"] if quick else [])]
        best: dict[str, Any] | None = None
        for _ in range(1 if quick else ATTEMPTS):
            noise = Noise()
            done = subprocess.run(words, capture_output=True, text=True, timeout=600)
            if done.returncode != 0:  # the engines can be compared all the same
                print(f"{number} limits FAILED: {done.stderr[-500:]}", flush=True)
                return
            limits = {**json.loads(done.stdout.splitlines()[-1]), **noise.figures()}
            if best is None or limits["others_pct"] < best["others_pct"]:
                best = limits
            if best["others_pct"] <= self._args.max_others:
                break
        assert best is not None
        place = {"round": number, "model": model, "precision": precision, "quick": quick}
        self._record({"workload": "limits", **place, **best})
        print(f"{number} limits: {json.dumps(best)}", flush=True)

    def _salt(self, *parts: object) -> int:
        """New prompts in every round and attempt, the same for all engines."""
        return zlib.crc32(repr((self._args.seed, *parts)).encode())

    def _record(self, line: dict[str, Any]) -> None:
        with self._out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **line}) + "\n")

    def _log(self, visit: Visit) -> Path:
        return self._logs / f"{visit.engine}-{visit.model}-{visit.precision}.log"

    def _say(self, visit: Visit, text: str) -> None:
        where = f"{visit.model} {visit.precision} {visit.engine}"
        print(f"{visit.round} {where:<32} {text}", flush=True)


def able_to(engine: str) -> tuple[str, ...]:
    """The workloads that mean something for an engine."""
    if engine == "llama-bench":
        return ("decode", "prefill")
    if engine == "transformers":  # it serves one request at a time, so only these compare
        return ("decode", "prefill", "memory")
    return WORKLOADS


def keys_of(lines: Sequence[dict[str, Any]], *, quick: bool) -> set[Key]:
    """What a file has already; quick looks count for quick looks only."""
    return {
        Key(*(line[name] for name in Key._fields))
        for line in lines
        if line["workload"] in WORKLOADS and line.get("quick", False) == quick
    }


def main() -> None:
    args = _arguments()
    installed = Peers(peers.homes(args.peer), Path(args.models), args.threads)
    logs = Path(args.logs or tempfile.mkdtemp(prefix="headrace-compare-"))
    logs.mkdir(parents=True, exist_ok=True)
    print(f"results: {args.out}; logs of the engines: {logs}", flush=True)
    Comparison(args, installed, logs).run()
    text = render.tables(render.read(Path(args.out)), Path(args.models))
    print("\n" + text)
    if args.write:
        render.write(Path(args.write), text)


def _machine() -> dict[str, Any]:
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.processor())  # fmt: skip
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": cpu, "num_cpus": os.cpu_count(), "memory_gib": round(pages / 2**30),
            "python": platform.python_version(), "kernel": platform.release()}  # fmt: skip


def _listed(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A type for comma lists of known words."""

    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r}: must be of {', '.join(known)}")
        return words

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    models = ("qwen06", "llama1b", "tiny")
    add = parser.add_argument
    add("--models", default=os.environ.get("HEADRACE_BENCH_MODELS", "models"), metavar="FOLDER",
        help="the checkpoints; checkpoints.py makes the plain ones, peers.py has all names")  # fmt: skip
    add("--peer", action="append", default=[], metavar="NAME=FOLDER",
        help="virtual environment of vllm, openvino, transformers or headrace-before, which is another "
        "headrace; llama.cpp's programs")  # fmt: skip
    add("--engines", type=_listed(peers.ENGINES), default=list(peers.ENGINES), metavar="NAMES",
        help=f"of {', '.join(peers.ENGINES)} (default: all that are installed)")  # fmt: skip
    add("--only", type=_listed(WORKLOADS), default=list(WORKLOADS), metavar="NAMES",
        help=f"of {', '.join(WORKLOADS)} (default: all)")  # fmt: skip
    add("--model", type=_listed(models), default=list(models), metavar="NAMES",
        help="(default: qwen06,llama1b,tiny)")  # fmt: skip
    precisions = ("bf16", "int8", "int4", *peers.BLOCKS, *peers.PACKED)
    add("--precision", type=_listed(precisions), default=list(precisions), metavar="NAMES",
        help=f"(default: {','.join(precisions)}; those with q are GGUF files)")  # fmt: skip
    add("--rounds", type=int, default=3, help="(default: 3)")
    add("--threads", type=int, default=os.cpu_count(), help="of engines that must be told")
    add("--cache-gib", type=int, default=peers.CACHE_GIB, metavar="GIB",
        help="key-value cache of engines offline, resident before they are timed (default: 4)")  # fmt: skip
    add("--seed", type=int, default=0, help="of the prompts")
    add("--max-others", type=float, default=6.0, metavar="PERCENT",
        help="a run while others take more of the machine is repeated (default: 6)")  # fmt: skip
    add("--no-limits", action="store_true", help="do not measure the machine's limits")
    add("--quick", action="store_true", help="an eighth of the lengths, nothing repeated")
    add("--out", default="results.jsonl", metavar="FILE", help="(default: results.jsonl)")
    add("--logs", metavar="FOLDER", help="what the engines say (default: a new temporary folder)")
    add("--write", metavar="FILE", help="put the tables into this Markdown file")
    args = parser.parse_args()
    if args.quick:
        args.rounds = 1
    return args


if __name__ == "__main__":
    main()
