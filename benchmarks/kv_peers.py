"""How fast blocks of a KV cache go from one process to another, by each connector, beside a copy in memory.

    python benchmarks/kv_peers.py [--kib 64 512 4096] [--blocks 64] [--rounds 5] [--ways p2p nixl mooncake]

One process gives blocks, another takes them: from the call of ``fetch`` until every block is in the taker's
memory, checked. The plain copy is of the same blocks, from one stretch of memory into another, within one
process; the checked copy is that one with a checksum as the connectors make it. Ways take turns. A connector
whose library is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Any

from headrace_core import plugins
from headrace_core.errors import MissingDependency
from headrace_core.kv import KVConnector

POLL_SECONDS = 0.0002


def made(way: str, role: str, num_bytes: int) -> KVConnector:
    extra = {"mooncake": {"trust_network": True}}.get(way, {})
    settings = {
        "kv_connector": way, "kv_role": role, "kv_port": 0, "kv_buffer_size": num_bytes,
        "kv_connector_extra_config": {"keep_seconds": 3600, "fetch_timeout": 300, **extra},
    }  # fmt: skip
    connector = plugins.load("headrace.kv_connectors", way)(settings)
    assert isinstance(connector, KVConnector)
    return connector


def keys(count: int) -> list[bytes]:
    return [sha256(str(n).encode()).digest() for n in range(count)]


def give(way: str, kib: int, count: int) -> None:
    """A process that has blocks, until its input ends."""
    giver = made(way, "kv_producer", (kib << 10) * count)
    content = memoryview(bytes(range(256)) * (4 * kib))
    for key in keys(count):
        giver.save(key, content)
    print("ADDRESS", *giver.address().values(), flush=True)
    sys.stdin.read()
    giver.close()


class Fetch:
    """A taker, and the process that gives."""

    def __init__(self, way: str, kib: int, count: int) -> None:
        self._taker = made(way, "kv_consumer", (kib << 10) * count)
        command = [sys.executable, __file__, "--give", way, str(kib), str(count)]
        self._giver = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._giver.stdout is not None
        line = next(line for line in self._giver.stdout if line.startswith("ADDRESS"))
        host, port, engine = line.split()[1:]
        self._params = {"remote_host": host, "remote_port": int(port), "remote_engine_id": engine}
        self._blocks = dict.fromkeys(keys(count), kib << 10)
        self._into = memoryview(bytearray(kib << 10))

    def __call__(self) -> float:
        start = time.perf_counter()
        while self._taker.fetch("r", self._blocks, self._params):
            time.sleep(POLL_SECONDS)
        seconds = time.perf_counter() - start
        if not all(self._taker.load(key, self._into) for key in self._blocks):  # and forget them
            raise SystemExit("blocks did not come")
        return seconds

    def close(self) -> None:
        self._taker.close()
        assert self._giver.stdin is not None
        self._giver.stdin.close()
        self._giver.wait()


def copying(kib: int, count: int, *, checks: bool) -> Callable[[], float]:
    source, target = bytearray(b"x" * ((kib << 10) * count)), bytearray((kib << 10) * count)

    def copy() -> float:
        start = time.perf_counter()
        target[:] = source
        for at in range(0, len(target), kib << 10) if checks else ():
            blake2b(memoryview(target)[at : at + (kib << 10)]).digest()
        return time.perf_counter() - start

    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=["p2p", "nixl", "mooncake"])
    parser.add_argument("--give", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.give:
        give(args.give[0], *map(int, args.give[1:]))
        return
    print("| KiB a block | way | GB/s, median | best | of the plain copy |\n|---|---|---|---|---|")
    for kib in args.kib:
        measure(kib, args)


def measure(kib: int, args: argparse.Namespace) -> None:
    ways: dict[str, Any] = {
        "plain copy": copying(kib, args.blocks, checks=False),
        "checked copy": copying(kib, args.blocks, checks=True),
    }
    for way in args.ways:
        try:
            ways[way] = Fetch(way, kib, args.blocks)
        except MissingDependency as error:
            print(f"{way} is left out: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(args.rounds + 1):
        for way, run in ways.items():
            seconds = run()
            if turn:  # the first is to warm up
                times[way].append(seconds)
    size = (kib << 10) * args.blocks / 1e9
    plain = size / statistics.median(times["plain copy"])
    for way, found in times.items():
        speed = size / statistics.median(found)
        print(f"| {kib} | {way} | {speed:.2f} | {size / min(found):.2f} | {speed / plain:.0%} |")
        if isinstance(ways[way], Fetch):
            ways[way].close()


if __name__ == "__main__":
    main()
