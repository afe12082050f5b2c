"""A router over several servers beside one with the same total cache: ``python benchmarks/router.py --help``.

Real processes and sockets; the servers have the simulated device, whose caches are kept as real ones are.
Prompts of some groups, each with a long beginning of its own, are asked in random order by many streams at a
time. Printed are the shares of prompt tokens that were found in the caches, and, of a second run in which one
server is drained and another killed, how each request ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2

from headrace.bench.http import Client, HttpError

START_SECONDS = 240.0
TOKENS_A_WORD = 2
"""About, of the demo model's tokenizer."""


class Server(NamedTuple):
    process: subprocess.Popen[bytes]
    url: str


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--streams", type=int, default=200, help="at a time")
    parser.add_argument("--requests", type=int, default=800, help="of each run")
    parser.add_argument("--groups", type=int, default=40, help="beginnings of prompts")
    parser.add_argument("--prefix", type=int, default=480, help="tokens of a beginning, about")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--blocks", type=int, default=3200, help="of all caches together")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument(
        "--quick", action="store_true", help="numbers for seconds, to see whether it works"
    )
    args = parser.parse_args()
    if args.quick:
        args.servers, args.streams, args.requests, args.groups = 3, 12, 60, 6
        args.blocks, args.prefix, args.tokens, args.step_ms = 480, 240, 8, 2.0
    return args


def free_port() -> int:
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        return int(kept.getsockname()[1])


@contextmanager
def started(*words: str) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, "-m", "headrace", *words, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Server(process, f"http://127.0.0.1:{port}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def wait(servers: Sequence[Server]) -> None:
    """Until all answer."""
    deadline = time.monotonic() + START_SECONDS
    for server in servers:
        while True:
            assert server.process.poll() is None, "a server ended at its start"
            assert time.monotonic() < deadline, "a server did not start"
            try:
                if httpx2.get(server.url + "/health", timeout=10).status_code == 200:
                    break
            except httpx2.HTTPError:
                pass
            time.sleep(0.2)


def serve(stack: ExitStack, args: argparse.Namespace, count: int) -> list[Server]:
    words = (
        "serve", "--device", "sim", "--sim-step-ms", str(args.step_ms), "--num-gpu-blocks-override",
        str(args.blocks // count), "--max-num-seqs", str(args.streams), "--disable-uvicorn-access-log",
    )  # fmt: skip
    servers = [stack.enter_context(started(*words)) for _ in range(count)]
    wait(servers)
    return servers


def prompts(args: argparse.Namespace, seed: int) -> list[str]:
    chosen = random.Random(seed)
    words = ["river", "mill", "wheel", "stone", "water", "grain", "gate", "sluice"]

    def text(name: str, tokens: int) -> str:
        own = random.Random(name)
        return " ".join(own.choice(words) for _ in range(tokens // TOKENS_A_WORD))

    groups = [text(f"group {n}", args.prefix) for n in range(args.groups)]
    picked = [n % args.groups for n in range(args.requests)]
    chosen.shuffle(picked)
    return [f"{groups[g]} {text(f'{seed} {n}', 24)}" for n, g in enumerate(picked)]


async def ask(client: Client, prompt: str, tokens: int) -> str:
    """How a request ended."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True}
    try:
        answer = await client.post("/v1/completions", json.dumps(body).encode())
    except HttpError as failure:
        return f"lost: {failure}"
    if answer.status != 200:
        return f"refused: {answer.status}"
    if b'data: {"error"' in answer.body:
        return "told that it broke off"
    return "whole" if b'"finish_reason":"length"' in answer.body else "lost: no end"


async def run(
    args: argparse.Namespace, url: str, seed: int, halfway: Any = None
) -> tuple[Counter[str], float]:
    """All requests, so many at a time; ``halfway`` is called beside them at a third of them.

    The client is one that needs little of the processor: one that is seconds behind finds connections
    closed that it has not sent a request on in time, and would count those as lost.
    """
    waiting = prompts(args, seed)
    ends: Counter[str] = Counter()
    began = time.perf_counter()
    beside: list[asyncio.Task[Any]] = []
    client = Client(url, timeout=600)

    async def stream() -> None:
        while waiting:
            prompt = waiting.pop()
            if halfway is not None and not beside and len(waiting) < args.requests * 2 // 3:
                beside.append(asyncio.create_task(asyncio.to_thread(halfway)))
            ends[await ask(client, prompt, args.tokens)] += 1

    await asyncio.gather(*(stream() for _ in range(args.streams)))
    await asyncio.gather(*beside)
    client.close()
    return ends, time.perf_counter() - began


def counted(servers: Sequence[Server]) -> tuple[float, float]:
    """Prompt tokens that were looked up, and those found."""
    totals = []
    texts = [httpx2.get(server.url + "/metrics", timeout=60).text for server in servers]
    for name in ("queries", "hits"):
        pattern = rf"^headrace:prefix_cache_{name}_total(?:\{{.*\}})? ([0-9.e+]+)$"
        totals.append(sum(float(x) for t in texts for x in re.findall(pattern, t, re.MULTILINE)))
    return totals[0], totals[1]


def alone(args: argparse.Namespace) -> float:
    with ExitStack() as stack:
        servers = serve(stack, args, 1)
        ends, seconds = asyncio.run(run(args, servers[0].url, 1))
        queries, hits = counted(servers)
    print(f"one server: {dict(ends)}, {seconds:.1f} s, hit rate {hits / queries:.3f}", flush=True)
    return hits / queries


def routed(args: argparse.Namespace) -> float:
    with ExitStack() as stack:
        servers = serve(stack, args, args.servers)
        words = [word for server in servers for word in ("--server", server.url)]
        router = stack.enter_context(started("route", *words, "--dev-mode"))
        wait([router])
        ends, seconds = asyncio.run(run(args, router.url, 1))
        queries, hits = counted(servers)
        print(
            f"router over {args.servers}: {dict(ends)}, {seconds:.1f} s, hit rate {hits / queries:.3f}",
            flush=True,
        )

        def disturb() -> None:
            body = {"server": servers[0].url}
            httpx2.post(router.url + "/router/drain", json=body, timeout=60).raise_for_status()
            servers[1].process.send_signal(signal.SIGKILL)

        ends, seconds = asyncio.run(run(args, router.url, 2, disturb))
        pattern = r"^headrace:router_retries_total ([0-9.]+)$"
        found = re.search(
            pattern, httpx2.get(router.url + "/metrics", timeout=60).text, re.MULTILINE
        )
    retries = found.group(1) if found else "?"
    print(
        f"one drained, one killed: {dict(ends)}, {seconds:.1f} s, {retries} sent again", flush=True
    )
    lost = sum(count for end, count in ends.items() if end.startswith(("lost", "refused")))
    assert not lost, f"{lost} requests are lost"
    return hits / queries


def main() -> None:
    args = parse()
    one = alone(args)
    several = routed(args)
    print(f"hit rate of the router: {several / one:.3f} of one server's", flush=True)


if __name__ == "__main__":
    assert Path(__file__).exists()
    main()
