"""Several engines beside one, on the simulated device: ``python benchmarks/data_parallel.py --help``.

The device computes nothing and takes a fixed time for each step and token, so what is measured is how far
the front end keeps engines busy. Servers run one after the other, each asked by ``headrace bench serve``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from processes import Launch, serving

METRICS = ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
EPILOG = """\
example:
  python benchmarks/data_parallel.py --engines 1 2 --num-prompts 10000
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2], metavar="N")
    parser.add_argument("--num-prompts", type=int, default=10_000, metavar="N")
    parser.add_argument("--concurrency", type=int, default=256, metavar="N")
    parser.add_argument("--input-len", type=int, default=64, metavar="TOKENS")
    parser.add_argument("--output-len", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--sim-step-ms", type=float, default=20.0, metavar="MS")
    parser.add_argument("--max-num-seqs", type=int, default=64, metavar="N", help="of each engine")
    return parser.parse_args()


def measure(args: argparse.Namespace, engines: int) -> dict[str, Any]:
    """What ``headrace bench serve`` found with so many engines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "headrace", "serve", "--device", "sim", "--port", str(port),
        "--sim-step-ms", str(args.sim_step_ms), "--max-num-seqs", str(args.max_num_seqs),
        "--data-parallel-size", str(engines), "--engine-process",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        with serving(Launch(command, {}), url, Path(folder, "log")):
            subprocess.run(
                [
                    sys.executable, "-m", "headrace", "bench", "serve", "--base-url", url,
                    "--num-prompts", str(args.num_prompts), "--max-concurrency", str(args.concurrency),
                    "--random-input-len", str(args.input_len),
                    "--random-output-len", str(args.output_len), "--ignore-eos",
                    "--save-result", "--result-dir", folder, "--result-filename", "result.json",
                ],
                check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        result: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return result


def main() -> None:
    args = arguments()
    print(f"{args.num_prompts} requests, {args.concurrency} at once, {os.cpu_count()} cores")
    print("| engines | completed | " + " | ".join(METRICS) + " |")
    print("|---" * (len(METRICS) + 2) + "|")
    for engines in args.engines:
        result = measure(args, engines)
        numbers = " | ".join(f"{result[name]:.1f}" for name in METRICS)
        print(f"| {engines} | {result['completed']} | {numbers} |", flush=True)


if __name__ == "__main__":
    main()
