"""Measure headrace and its peers: ``python benchmarks/run.py --help``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

import checkpoints
import limits
import online
import workloads

HERE = Path(__file__).parent
OFFLINE = ("decode", "prefill", "mixed", "prefix")
ONLINE = {"serve1": 1, "serve8": 8, "serve32": 32}
Results = dict[str, dict[str, list[dict[str, float]]]]
"""Workload -> engine -> figures of each run."""


class Worker:
    """An engine in a process of its own environment."""

    def __init__(self, name: str, python: str, model: Path, dtype: str) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py"), name, str(model), dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        self.start_seconds = self._answer()["ready"]

    def run(self, workload: str, salt: int, high: int, scale: float) -> dict[str, float]:
        """One run of one workload."""
        command = {"workload": workload, "salt": salt, "high": high, "scale": scale}
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._answer()
        if answer["wrong_lengths"]:
            raise RuntimeError(
                f"{self.name} {workload}: {answer['wrong_lengths']} outputs of wrong length"
            )
        figures: dict[str, float] = answer["figures"]
        return figures

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self.name} ended without an answer (status {self._process.wait()})"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    args = _arguments()
    scale, runs = (0.25, 1) if args.quick else (1.0, args.runs)
    model = checkpoints.make(args.model, Path(args.models))
    high = min(workloads.HIGH_ID, checkpoints.SHAPES[args.model]["vocab_size"])
    machine = limits.measure()
    print(_machine_line(machine))
    results: Results = defaultdict(lambda: defaultdict(list))
    wanted = args.workloads.split(",")
    workers = _start_workers(args, model)
    try:
        for workload in (w for w in wanted if w in OFFLINE):
            for worker in workers:  # warm: shapes, pools, caches of compiled code
                worker.run(workload, time.time_ns(), high, min(scale, 0.25))
            for _ in range(runs):
                for worker in workers:
                    figures = worker.run(workload, time.time_ns(), high, scale)
                    results[workload][worker.name].append(figures)
                    print(f"  {workload:<8} {worker.name:<14} {_short(figures)}", flush=True)
    finally:
        for worker in workers:
            worker.close()
    served = [w for w in wanted if w in ONLINE]
    if served:
        _serve(args, model, served, runs, scale, high, results)
    parameters = checkpoints.num_parameters(model)
    print("\n" + table(results, machine, parameters, args.dtype, scale))
    if args.json:
        Path(args.json).write_text(
            json.dumps({"machine": machine._asdict(), "results": results}, indent=1)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", choices=list(checkpoints.SHAPES))
    parser.add_argument("--models", default=str(Path(tempfile.gettempdir()) / "headrace-bench"),
                        help="folder for the random checkpoints")  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one run of quarter-length workloads")
    parser.add_argument("--workloads", default=",".join([*OFFLINE, *ONLINE]))
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[:MODEL]",
                        help="vllm, openvino or transformers in another environment")  # fmt: skip
    parser.add_argument("--server", action="append", default=[], metavar="NAME=URL",
                        help="a running peer server for the online workloads")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    return parser.parse_args()


def _start_workers(args: argparse.Namespace, model: Path) -> list[Worker]:
    if not set(args.workloads.split(",")) & set(OFFLINE):
        return []
    workers = [Worker("headrace", sys.executable, model, args.dtype)]
    if not args.no_transformers:
        workers.append(Worker("transformers", sys.executable, model, args.dtype))
    for peer in args.peer:
        name, _, where = peer.partition("=")
        python, _, own_model = where.partition(":")
        workers.append(Worker(name, python, Path(own_model) if own_model else model, args.dtype))
    for worker in workers:
        print(f"  loaded   {worker.name:<14} in {worker.start_seconds:.1f} s", flush=True)
    return workers


def _serve(
    args: argparse.Namespace,
    model: Path,
    served: list[str],
    runs: int,
    scale: float,
    high: int,
    results: Results,
) -> None:
    """Online workloads: our own server, started here, and peers that run already."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--port", str(port),
               "--dtype", args.dtype, "--max-model-len", "4096", "--disable-uvicorn-access-log"]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    targets = {"headrace": f"http://127.0.0.1:{port}/v1"} | dict(
        s.split("=", 1) for s in args.server
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server)
        for workload in served:
            for url in targets.values():
                online.measure(
                    url, ONLINE[workload], time.time_ns(), scale=min(scale, 0.25), high=high
                )
            for _ in range(runs):
                for name, url in targets.items():
                    figures = online.measure(
                        url, ONLINE[workload], time.time_ns(), scale=scale, high=high
                    )
                    results[workload][name].append(figures)
                    print(f"  {workload:<8} {name:<14} {_short(figures)}", flush=True)
    finally:
        server.terminate()
        server.wait(timeout=60)


def _wait_for(url: str, server: subprocess.Popen[bytes], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} did not answer in {seconds:g} s")


def table(
    results: Results, machine: limits.Limits, parameters: int, dtype: str, scale: float
) -> str:
    """Medians, ratios to headrace, fractions of the machine's limits, as Markdown."""
    rows = [
        "| workload | engine | median | unit | headrace is | of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for workload, engines in results.items():
        key, unit, better = workloads.HEADLINE[workload]
        medians = {n: statistics.median(f[key] for f in runs) for n, runs in engines.items()}
        for name, value in medians.items():
            ratio = (
                value / medians["headrace"] if better == "lower" else medians["headrace"] / value
            )
            fraction = _fraction(workload, value, machine, parameters, dtype, scale)
            shown = "-" if name == "headrace" else f"{ratio:.2f}x"
            extra = ""
            if "ttft_p50_ms" in engines[name][0]:
                extra = (
                    f"; TTFT {statistics.median(f['ttft_p50_ms'] for f in engines[name]):.0f} ms"
                )
            rows.append(
                f"| {workload} | {name} | {value:.3g} | {unit}{extra} | {shown} | {fraction} |"
            )
    return "\n".join(rows)


def _fraction(
    workload: str, value: float, machine: limits.Limits, parameters: int, dtype: str, scale: float
) -> str:
    """Share of what memory (decode) or arithmetic (prefill) would allow, if the workload has such a limit."""
    item = 4 if dtype == "float32" else 2
    flops = machine.fp32_gflop_s if dtype == "float32" else machine.bf16_gflop_s
    if workload == "decode":
        return f"{parameters * item / machine.read_gb_s / 1e9 / (value / 1e3):.0%} of reads"
    if workload == "prefill":
        return f"{2 * parameters * 2048 * scale / flops / 1e9 / value:.0%} of products"
    return "-"


def _machine_line(machine: limits.Limits) -> str:
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, torch reads {machine.read_gb_s:.1f} GB/s, "
        f"products {machine.bf16_gflop_s:.0f} (bf16) and {machine.fp32_gflop_s:.0f} (fp32) GFLOP/s; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _short(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


if __name__ == "__main__":
    main()
