"""How long ranks of one host take to add up a tensor, by communicator, and to get a message.

    python benchmarks/all_reduce.py [--ranks 2] [--seconds 0.5] [--kib 4 16 64 256 1024 4096 16384]
    [--one-round KIB]

Each communicator in turn, and again, in the same processes; figures are of rank 0's calls, each after a
barrier. The ring's is the time from a message's sending to the answer over
another ring, halved.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch

from headrace_core import plugins
from headrace_core.parallel import Communicator
from headrace_distributed.rendezvous import RendezvousServer
from headrace_distributed.shm import communicator as shm
from headrace_distributed.shm.ring import RingReader, RingWriter

NAMES = ("shm", "gloo")
MESSAGES = (100, 1_000, 10_000, 100_000)
"""Bytes of a step: of few requests, of many, with a long prompt."""


def measured(group: Communicator, kib: int, dtype: torch.dtype, seconds: float) -> list[float]:
    """All-reduces, in us, sorted; all ranks stop after the same call, which rank 0 chooses."""
    tensor = torch.ones((kib << 10) // dtype.itemsize, dtype=dtype)
    times: list[float] = []
    end = time.perf_counter() + seconds
    going = torch.ones(1)
    while going.item():
        for _ in range(10):
            group.barrier()
            start = time.perf_counter()
            group.all_reduce(tensor)
            times.append(time.perf_counter() - start)
            tensor.fill_(1)  # a sum of sums would overflow
        going = group.broadcast(torch.tensor([float(time.perf_counter() < end)]))
    return sorted(seconds * 1e6 for seconds in times[10:] or times)


def rank(
    connection: Connection,
    number: int,
    args: argparse.Namespace,
    addresses: dict[str, str],
) -> None:
    """One process: all communicators, all sizes, and the other end of the rings."""
    torch.set_num_threads(1)
    if args.one_round is not None:
        shm.one_round_bytes = lambda _: args.one_round << 10
    groups = {
        name: plugins.load("headrace.communicators", name)(number, args.ranks, addresses[name])
        for name in NAMES
    }
    found = [
        (dtype, kib, name, measured(group, kib, getattr(torch, dtype), args.seconds))
        for dtype in ("bfloat16", "float32")
        for kib in args.kib
        for _ in range(2)
        for name, group in groups.items()
    ]
    answers = RingWriter(1)
    connection.send((found, str(answers.handle)))
    if number:
        return  # rank 0 is the ring's other end
    messages = RingReader(connection.recv(), 0)
    while message := messages.receive():
        answers.send(message[:1])
    connection.close()


def round_trips(writer: RingWriter, reader: RingReader, size: int, seconds: float) -> list[float]:
    data, times, end = bytes(size), [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        writer.send(data)
        reader.receive()
        times.append((time.perf_counter() - start) / 2 * 1e6)
    return sorted(times)


def table(found: list[tuple[str, int, str, list[float]]]) -> None:
    """Medians of both turns, and in brackets the lowest tenth: what others leave of a machine."""
    times: dict[tuple[str, int], dict[str, list[float]]] = {}
    for dtype, kib, name, us in found:
        times.setdefault((dtype, kib), {}).setdefault(name, []).extend(us)
    print("| tensor | shm | gloo | shm is |\n| --- | --- | --- | --- |")
    for (dtype, kib), by_name in times.items():
        each = [sorted(by_name[name]) for name in NAMES]
        ours, theirs = (f"{us[len(us) // 2]:,.0f} ({us[len(us) // 10]:,.0f})" for us in each)
        ratio = statistics.median(each[1]) / statistics.median(each[0])
        print(f"| {kib:,} KiB, {dtype} | {ours} | {theirs} | {ratio:.1f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each figure's two turns")
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096, 16384])
    parser.add_argument("--one-round", type=int, help="KiB up to which all ranks add up everything")
    args = parser.parse_args()
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with RendezvousServer() as server:
        addresses = {name: server.address(name) for name in NAMES}
        pipes = [context.Pipe() for _ in range(args.ranks)]
        processes = [
            context.Process(target=rank, args=(there, number, args, addresses), daemon=True)
            for number, (_, there) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        told = [here.recv() for here, _ in pipes]
    print(f"{args.ranks} ranks, {len(os.sched_getaffinity(0))} cores; us, medians (lowest tenth)")
    table(told[0][0])
    print("\n| message | p10 | p50 | p99 |\n| --- | --- | --- | --- |")
    writer, reader = RingWriter(1), RingReader(told[0][1], 0)
    pipes[0][0].send(str(writer.handle))
    for size in MESSAGES:
        times = round_trips(writer, reader, size, args.seconds)
        p10, p50, p99 = (times[len(times) * share // 100] for share in (10, 50, 99))
        print(f"| {size:,} B | {p10:.1f} | {p50:.1f} | {p99:.1f} |")
    writer.send(b"")
    processes[0].join(10)


if __name__ == "__main__":
    main()
