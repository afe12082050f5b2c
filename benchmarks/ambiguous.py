"""What a request with a very ambiguous grammar costs the streams beside it.

    python benchmarks/ambiguous.py --rounds 5 --step-ms 25

starts a server with the bundled demo model and streams four completions of 300 tokens, in turn alone,
beside requests with a plain regex, and beside ones with a grammar of 110 bytes that can be read in a number
of ways which grows with every token, one after the other. Reports the time between two of a stream's
events, and its 99th percentile against the plain neighbour's: a fifth stream costs its share of compute in
either case. The demo model's steps take a millisecond; ``--step-ms`` makes them as long as a real one's.
``--clients`` has several send such requests at the same time.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

GRAMMAR = 'root ::= s\ns ::= s s | s s s | "a" | "b" | "ab" | "ba" | "aba" | s "a" s | "bb" s | ""'
STREAMS = 4
TOKENS = 300
MODEL = "headrace-demo"


@contextmanager
def serving(step_seconds: float, clients: int, words: Sequence[str]) -> Iterator[int]:
    """A server on a port of its own, whose steps take so much longer for all requests together."""
    slower = f"engine.step.forward=delay(match=,seconds={step_seconds / (STREAMS + clients)})"
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", "0", "--disable-uvicorn-access-log", *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **({"HEADRACE_FAILPOINTS": slower} if step_seconds else {})},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "serving at http://" in line:
                port = line.split("serving at http://")[1].split()[0].strip('"').rsplit(":", 1)[1]
                threading.Thread(target=process.stdout.read, daemon=True).start()
                yield int(port.strip("/"))
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def stream(port: int, body: dict[str, Any]) -> tuple[list[float], str | None]:
    """Seconds at which the events with text came, and the finish reason."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    full = {"model": MODEL, "stream": True, **body}
    connection.request(
        "POST", "/v1/completions", json.dumps(full), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    arrivals, reason = [], None
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        (choice,) = json.loads(line[6:])["choices"]
        reason = choice["finish_reason"]
        arrivals.append(time.perf_counter())
    connection.close()
    return arrivals, reason


def measured(port: int, clients: int, beside: dict[str, Any] | None) -> tuple[list[float], int]:
    """Times between events of all streams, in seconds, and how many such neighbours ended meanwhile."""
    found: list[list[float]] = []
    running, seeds, ended = threading.Event(), itertools.count(), list[int]()

    def free(index: int) -> None:
        body = {"prompt": f"{index} once", "max_tokens": TOKENS, "ignore_eos": True, "seed": index}
        arrivals, _ = stream(port, body)
        found.append([b - a for a, b in itertools.pairwise(arrivals)])

    def neighbour() -> None:
        while beside is not None and not running.is_set():
            seed = next(seeds)
            stream(port, {"prompt": "x", "max_tokens": TOKENS, "seed": seed, **beside})
            ended.append(seed)

    threads = [threading.Thread(target=free, args=(index,)) for index in range(STREAMS)]
    others = [threading.Thread(target=neighbour) for _ in range(clients)]
    for thread in others + threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.set()
    for thread in others:
        thread.join()
    return [gap for gaps in found for gap in gaps], len(ended)


def p99(gaps: Sequence[float]) -> float:
    """The 99th percentile, in milliseconds."""
    return sorted(gaps)[int(0.99 * len(gaps))] * 1e3


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument(
        "--clients", type=int, default=1, help="that send constrained requests at the same time"
    )
    parser.add_argument(
        "--serve", type=str.split, default=[], help="further words of headrace serve"
    )
    args = parser.parse_args()
    kinds: dict[str, dict[str, Any] | None] = {
        "alone": None,
        "plain regex": {"structured_outputs": {"regex": "[ab]{400}"}},
        "ambiguous": {"structured_outputs": {"grammar": GRAMMAR}, "min_tokens": TOKENS},
    }
    figures: dict[str, list[float]] = {kind: [] for kind in kinds}
    with serving(args.step_ms / 1e3, args.clients, args.serve) as port:
        for beside in kinds.values():
            measured(port, args.clients, beside)
        for _ in range(args.rounds):
            for kind, beside in kinds.items():
                gaps, ended = measured(port, args.clients, beside)
                figures[kind].append(p99(gaps))
                print(f"{kind:12} median {statistics.median(gaps) * 1e3:6.2f} ms  p99 {p99(gaps):7.2f} ms"
                      f"  longest {max(gaps) * 1e3:7.2f} ms  neighbours {ended}", flush=True)  # fmt: skip
    ratios = [a / b for a, b in zip(figures["ambiguous"], figures["plain regex"])]
    print(f"p99 beside the ambiguous grammar / beside a plain regex: median {statistics.median(ratios):.2f}, "
          f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
