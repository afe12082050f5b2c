"""Ranks beside one process: decoding, and how soon a rank knows of a pass.

    python benchmarks/ranks.py decode MODEL [--batch 1 8] [--rounds 5] [--communicators shm gloo]
    python benchmarks/ranks.py prefill MODEL [--length 2048] [--rounds 5]
    python benchmarks/ranks.py passes [--batch 1 8 32] [--work-ms 5]

``decode`` starts an engine with all threads, and one with two ranks that share them, and has them
generate in turns: prompts are in the prefix cache, so it is decoding that is timed. ``prefill`` times the
first token of one prompt that is not cached, in one process, with two ranks that divide layers (``-tp 2``)
and with two that divide the prompt (``-pcp 2``). ``passes`` starts a rank
without a model and leads passes of a step's batch, as the engine does: from the call on rank 0 until the
other rank's worker is called, and until rank 0 begins its own. Rank 0 works between passes, the other waits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from processes import Noise

from headrace_core.batch import ForwardBatch, GroupBatch

BLOCK_SIZE = 16
MOST_OTHERS_PCT = 3.0
"""Of the machine; a round in which others took more is not counted."""
SETTLE_SECONDS = 0.05
"""Rest before a turn: idle threads of the one before look for work for a while."""


class Stamps:
    """A rank's worker that notes when it is called with passes."""

    def __init__(self) -> None:
        self._ns: list[int] = []

    def run_pass(self, method: str, args: Sequence[Any]) -> None:
        self._ns.append(time.perf_counter_ns())

    def report(self) -> dict[str, list[int]]:
        """Of the system's monotonic clock, which all processes share."""
        noted, self._ns = self._ns, []
        return {"ns": noted}

    def close(self) -> None:
        """Nothing to close."""


def follower(config: object, place: object) -> Stamps:
    """The worker of a rank's process."""
    return Stamps()


class Model:
    """Rank 0's, whose pass notes when it begins."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def forward(self, batch: ForwardBatch) -> None:
        self.begun.append(time.perf_counter_ns())


def decode_batch(num_seqs: int, context: int = 1024) -> ForwardBatch:
    """A decode step's batch."""
    lengths = torch.full((num_seqs,), context, dtype=torch.int32)
    table = torch.arange(num_seqs * context // BLOCK_SIZE, dtype=torch.int32).view(num_seqs, -1)
    ids = torch.arange(num_seqs)
    return ForwardBatch(
        ids, lengths.long() - 1, torch.arange(num_seqs + 1, dtype=torch.int32), lengths, 1, context,
        (GroupBatch(table, ids * context),), logits_rows=ids,
    )  # fmt: skip


def busy(seconds: float) -> None:
    """Work as rank 0 does between passes."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def passes(args: argparse.Namespace) -> None:
    """Print the times of passes, by the size of the batch."""
    from headrace_engine.config import EngineConfig
    from headrace_engine.multiproc.leader import PassLeader
    from headrace_engine.multiproc.places import RankedWorkers
    from headrace_engine.multiproc.rank_processes import RankProcesses

    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    ranked = RankedWorkers(lambda *_: None, "ranks:follower", EngineConfig(), 2)  # type: ignore[arg-type]
    others = RankProcesses(ranked, {}, lambda error: print(error))
    others.wait_started()
    model = Model()
    PassLeader(others.run_pass, lambda error: error, others.call).lead(model)
    print("| requests | known to the other rank, us: p10 | p50 | p90 | rank 0 begins, us: p50 |")
    print("|---|---|---|---|---|")
    for num_seqs in args.batch:
        batch, called = decode_batch(num_seqs), []
        model.begun.clear()
        for _ in range(args.passes + 20):
            busy(args.work_ms / 1000)
            called.append(time.perf_counter_ns())
            model.forward(batch)
        stamps = others.call("report", ())[0].result()["ns"]
        known, begun = (
            sorted((b - a) / 1000 for a, b in list(zip(called, each, strict=True))[20:])
            for each in (stamps, model.begun)
        )
        p10, p50, p90 = (known[len(known) * share // 100] for share in (10, 50, 90))
        print(
            f"| {num_seqs} | {p10:.0f} | {p50:.0f} | {p90:.0f} | {statistics.median(begun):.0f} |"
        )
    others.stop()


class Engine:
    """An engine in a process of its own: two in one process would share its threads.

    Args:
        settings: of :class:`headrace.LLM`.
    """

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, model, settings))
        self._process.start()
        self._pipe.recv()

    def decode(self, num_seqs: int, num_tokens: int) -> float:
        """Milliseconds a decode step of so many requests takes."""
        self._pipe.send((num_seqs, num_tokens, 128))
        seconds: float = self._pipe.recv()
        return seconds * 1000

    def prefill(self, length: int) -> float:
        """Milliseconds to the first token of a prompt of so many tokens."""
        self._pipe.send((1, 1, length))
        seconds: float = self._pipe.recv()
        return seconds * 1000

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Connection, model: str, settings: dict[str, Any]) -> None:
    """Decode what is asked for until None is."""
    from headrace import LLM, SamplingParams

    size = {"max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20}
    with LLM(model, kv_cache_ahead_bytes=-1, **{**size, **settings}) as llm:
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            num_seqs, num_tokens, length = asked
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            prompts = [[100 + i, *range(200, 199 + length)] for i in range(num_seqs)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            pipe.send((time.perf_counter() - start) / num_tokens)


def turn(
    engines: dict[str, Engine], measure: Callable[[Engine], float]
) -> tuple[dict[str, float], float]:
    """Milliseconds by layout, and per cent of the machine that others took meanwhile."""
    noise, times = Noise(), {}
    for name, engine in engines.items():
        time.sleep(SETTLE_SECONDS)
        times[name] = measure(engine)
    return times, noise.figures()["others_pct"]


def print_rounds(
    what: str, engines: dict[str, Engine], rounds: int, measure: Callable[[Engine], float]
) -> None:
    """Measure in turns until there are so many rounds in which the machine was quiet; print a row for each
    layout."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    tries = 0
    while len(next(iter(times.values()))) < rounds and tries < 3 * rounds:
        tries += 1
        one, others = turn(engines, measure)
        if others < MOST_OTHERS_PCT:
            for name, ms in one.items():
                times[name].append(ms)
    if not all(times.values()):
        raise SystemExit(f"others took more than {MOST_OTHERS_PCT} % in every round")
    base = next(iter(times.values()))
    for name, each in times.items():
        ratios = sorted(b / a for a, b in zip(base, each, strict=True))
        print(
            f"| {what} | {name} | {statistics.median(each):.1f} "
            f"({min(each):.1f}-{max(each):.1f}) | {statistics.median(ratios):.2f}x "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f}) |", flush=True,
        )  # fmt: skip


def decode(args: argparse.Namespace) -> None:
    """Print the times of decode steps, by layout and number of requests."""
    threads = len(os.sched_getaffinity(0))
    layouts: dict[str, dict[str, Any]] = {f"1 process, {threads} threads": {}} | {
        f"2 ranks, {name}": {"tensor_parallel_size": 2, "communicator": name}
        for name in args.communicators
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(Engine(args.model, {"num_threads": threads, **own})))
            for name, own in layouts.items()
        }
        print(
            "| requests | layout | ms a step, median (lowest-highest) | of one process, by round |"
        )
        print("|---|---|---|---|")
        for num_seqs in args.batch:
            for engine in engines.values():  # prompts are cached then
                engine.decode(num_seqs, 4)
            steps = partial(Engine.decode, num_seqs=num_seqs, num_tokens=args.tokens)
            print_rounds(str(num_seqs), engines, args.rounds, steps)


def prefill(args: argparse.Namespace) -> None:
    """Print the times to the first token of one prompt, by layout."""
    threads, length = len(os.sched_getaffinity(0)), args.length
    settings = {
        "num_threads": threads, "max_model_len": length + 64, "max_num_batched_tokens": length,
        "enable_prefix_caching": False,
    }  # fmt: skip
    layouts: dict[str, dict[str, Any]] = {
        f"1 process, {threads} threads": {},
        "-tp 2": {"tensor_parallel_size": 2},
        "-pcp 2": {"prefill_context_parallel_size": 2},
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(closing(Engine(args.model, {**settings, **own})))
            for name, own in layouts.items()
        }
        print(
            "| tokens | layout | ms to the first token, median (lowest-highest) | of one process |"
        )
        print("|---|---|---|---|")
        for engine in engines.values():
            engine.prefill(length)
        measure = partial(Engine.prefill, length=length)
        print_rounds(str(length), engines, args.rounds, measure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("decode", help="two ranks beside one process")
    one.add_argument("model", help="folder of the checkpoint")
    one.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    one.add_argument("--tokens", type=int, default=64, help="of each request and round")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--communicators", nargs="+", default=["shm"], choices=["shm", "gloo"])
    one.set_defaults(run=decode)
    first = commands.add_parser("prefill", help="the first token of a long prompt")
    first.add_argument("model", help="folder of the checkpoint")
    first.add_argument("--length", type=int, default=2048, help="tokens of the prompt")
    first.add_argument("--rounds", type=int, default=5)
    first.set_defaults(run=prefill)
    two = commands.add_parser("passes", help="how soon a rank knows of a pass")
    two.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    two.add_argument("--passes", type=int, default=500)
    two.add_argument("--work-ms", type=float, default=5.0, help="of rank 0 between two passes")
    two.set_defaults(run=passes)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
