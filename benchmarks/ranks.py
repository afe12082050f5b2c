"""Ranks beside one process: decoding, and how soon a rank knows of a pass.

    python benchmarks/ranks.py decode MODEL [--batch 1 8] [--rounds 5] [--communicators shm gloo]
    python benchmarks/ranks.py passes [--batch 1 8 64 256] [--work-ms 5] [--ahead-us 200]
                                       [--read-mb 0] [--parts]

``decode`` starts an engine with all threads, and one with two ranks that share them, and has them
generate in turns: prompts are in the prefix cache, so it is decoding that is timed. ``passes`` starts a rank
without a model and leads passes of a step's batch, as the engine does: from the call on rank 0 until the
other rank's worker is called, and until rank 0 begins its own. Rank 0 works between passes, the other waits:
asleep, or awake as rank 0 has said a while ahead that a pass is about to come, as it does when a step begins.
The batch is made right before its pass.
Each pass is of a step further: a token more of each request, and a block more of every sixteenth.
With ``--read-mb`` each rank reads so much memory in a pass, as a model reads weights: what ran before it is
no longer in the processor's caches then. With ``--parts`` a second table says where the time goes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
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
READ_MB, PARTS = "HEADRACE_BENCH_READ_MB", "HEADRACE_BENCH_PARTS"
"""Variables by which the other rank's process knows of options."""
WARMING = 20
"""Passes at the beginning of a run that are not counted."""


class Noted:
    """Notes when calls of a method begin and end, by the clock that all processes share."""

    def __init__(self, owner: type, name: str) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        run = getattr(owner, name)

        def noted(*args: Any) -> Any:
            self.begun.append(time.perf_counter_ns())
            result = run(*args)
            self.ended.append(time.perf_counter_ns())
            return result

        setattr(owner, name, noted)

    def take(self) -> tuple[list[int], list[int]]:
        """Begins and ends since the last time."""
        taken, self.begun, self.ended = (self.begun, self.ended), [], []
        return taken


class Weights:
    """Memory that a pass reads.

    Args:
        size_mb: 0: it reads none.
    """

    def __init__(self, size_mb: int) -> None:
        self._values = torch.ones(size_mb << 18)

    def read(self) -> None:
        """Read it all."""
        if len(self._values):
            self._values.sum()


class Stamps:
    """A rank's worker that notes when it is called with passes."""

    def __init__(self) -> None:
        self._ns: list[int] = []
        self._weights = Weights(int(os.environ[READ_MB]))
        self._decoding: Noted | None = None
        if os.environ[PARTS]:
            from headrace_engine.multiproc.pass_decoder import PassDecoder

            self._decoding = Noted(PassDecoder, "decode")

    def run_pass(self, method: str, args: Sequence[Any]) -> None:
        self._ns.append(time.perf_counter_ns())
        self._weights.read()

    def report(self) -> dict[str, list[int]]:
        """By what happened."""
        called, self._ns = self._ns, []
        begun, ended = ([], []) if self._decoding is None else self._decoding.take()
        return {"called": called, "decoding": begun, "decoded": ended}

    def close(self) -> None:
        """Nothing to close."""


def follower(config: object, place: object) -> Stamps:
    """The worker of a rank's process."""
    torch.set_num_threads(1)
    return Stamps()


class Model:
    """Rank 0's, whose pass notes when it begins."""

    def __init__(self, weights: Weights) -> None:
        self.begun: list[int] = []
        self._weights = weights

    def forward(self, batch: ForwardBatch) -> None:
        self.begun.append(time.perf_counter_ns())
        self._weights.read()


def decode_batch(num_seqs: int, step: int, context: int = 1024) -> ForwardBatch:
    """A decode step's batch, of a run in which requests have their blocks at different steps."""
    ids = torch.arange(num_seqs)
    lengths = context - BLOCK_SIZE + (ids + step) % BLOCK_SIZE + 1
    table = torch.arange(num_seqs * context // BLOCK_SIZE, dtype=torch.int32).view(num_seqs, -1)
    table[:, -1] += (ids.int() + step) // BLOCK_SIZE
    return ForwardBatch(
        ids + step, lengths - 1, torch.arange(num_seqs + 1, dtype=torch.int32), lengths.int(), 1,
        context, (GroupBatch(table, ids * context + lengths - 1),),
    )  # fmt: skip


def busy(seconds: float) -> None:
    """Work as rank 0 does between passes."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


class LedRank:
    """Rank 0 of two, and the process of the other one."""

    def __init__(self, args: argparse.Namespace) -> None:
        from headrace_engine.config import EngineConfig
        from headrace_engine.multiproc.leader import PassLeader
        from headrace_engine.multiproc.pass_frames import PassEncoder
        from headrace_engine.multiproc.places import RankedWorkers
        from headrace_engine.multiproc.rank_processes import RankProcesses

        here = str(Path(__file__).parent)
        os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
        os.environ[READ_MB], os.environ[PARTS] = str(args.read_mb), "1" if args.parts else ""
        ranked = RankedWorkers(lambda *_: None, "ranks:follower", EngineConfig(), 2)  # type: ignore[arg-type]
        self.others = RankProcesses(ranked, {}, lambda error: print(error))
        self.others.wait_started()
        self.encoding = Noted(PassEncoder, "encode") if args.parts else None
        self.leader = PassLeader(
            self.others.run_pass, lambda error: error, self.others.call, self.others.expect_pass
        )
        self.model = Model(Weights(args.read_mb))
        self.leader.lead(self.model)

    def take_notes(self) -> dict[str, list[int]]:
        """When what happened in each pass since the last time, by what."""
        notes: dict[str, list[int]] = self.others.call("report", ())[0].result()
        notes["begun"], self.model.begun = self.model.begun, []
        if self.encoding is not None:
            notes["encoding"], notes["encoded"] = self.encoding.take()
        return notes


def passes(args: argparse.Namespace) -> None:
    """Print the times of passes, by the size of the batch."""
    torch.set_num_threads(1)
    rank = LedRank(args)
    print(
        "| requests | bytes of a pass | known to the other rank, asleep, us: p10 | p50 | p90 "
        "| awake: p10 | p50 | p90 | rank 0 begins, awake, us: p50 |"
    )
    print("|" + "---|" * 9)
    parts = []
    for num_seqs in args.batch:
        size, times = pass_bytes(num_seqs), []
        for is_expected in (False, True):
            notes = timed_passes(args, rank, num_seqs, is_expected)
            known = sorted(between(notes, "asked", "called"))
            times += [known[len(known) * share // 100] for share in (10, 50, 90)]
        times.append(statistics.median(between(notes, "asked", "begun")))
        print(f"| {num_seqs} | {size} | " + " | ".join(f"{us:.0f}" for us in times) + " |")
        if args.parts:
            parts.append((num_seqs, [statistics.median(between(notes, *pair)) for pair in PAIRS]))
    if args.parts:
        print("\n| requests, awake; us, p50 | call to encoding | encoding | to the other rank's "
              "buffer | decoding | its call | encoded to rank 0's own pass |")  # fmt: skip
        print("|" + "---|" * 7)
    for num_seqs, each in parts:
        print(f"| {num_seqs} | " + " | ".join(f"{us:.1f}" for us in each) + " |")
    rank.others.stop()


PAIRS = (
    ("asked", "encoding"), ("encoding", "encoded"), ("encoded", "decoding"), ("decoding", "decoded"),
    ("decoded", "called"), ("encoded", "begun"),
)  # fmt: skip
"""Parts of a pass's way, by what happens at their ends."""


def between(notes: dict[str, list[int]], first: str, second: str) -> list[float]:
    """Microseconds between two things that happen in each pass."""
    pairs = zip(notes[first], notes[second], strict=True)
    return [(b - a) / 1000 for a, b in list(pairs)[WARMING:]]


def pass_bytes(num_seqs: int) -> int:
    """Bytes of the second pass of a run."""
    from headrace_engine.multiproc.messages import ModelPass
    from headrace_engine.multiproc.pass_frames import PassEncoder

    encoder = PassEncoder()
    sent = [encoder.encode(ModelPass("forward", (decode_batch(num_seqs, n),))) for n in range(2)]
    return len(sent[-1] or b"")


def timed_passes(
    args: argparse.Namespace, rank: LedRank, num_seqs: int, is_expected: bool
) -> dict[str, list[int]]:
    """When what happened in each pass, by what.

    Args:
        is_expected: the other rank is told ahead.
    """
    asked: list[int] = []
    rank.take_notes()
    for step in range(args.passes + WARMING):
        busy(args.work_ms / 1000)
        if is_expected:
            rank.leader.expect()
            busy(args.ahead_us / 1e6)
        batch = decode_batch(num_seqs, step)  # as the engine does, right before its pass
        asked.append(time.perf_counter_ns())
        rank.model.forward(batch)
    return {"asked": asked, **rank.take_notes()}


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
        self._pipe.send((num_seqs, num_tokens))
        seconds: float = self._pipe.recv()
        return seconds * 1000

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Connection, model: str, settings: dict[str, Any]) -> None:
    """Decode what is asked for until None is."""
    from headrace import LLM, SamplingParams

    with LLM(model, max_model_len=1024, kv_cache_memory_bytes=512 << 20, kv_cache_ahead_bytes=-1,
             **settings) as llm:  # fmt: skip
        pipe.send("ready")
        while (asked := pipe.recv()) is not None:
            num_seqs, num_tokens = asked
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            prompts = [[100 + i, *range(200, 327)] for i in range(num_seqs)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            pipe.send((time.perf_counter() - start) / num_tokens)


def turn(
    engines: dict[str, Engine], num_seqs: int, num_tokens: int
) -> tuple[dict[str, float], float]:
    """Milliseconds of a step by layout, and per cent of the machine that others took meanwhile."""
    noise, times = Noise(), {}
    for name, engine in engines.items():
        time.sleep(SETTLE_SECONDS)
        times[name] = engine.decode(num_seqs, num_tokens)
    return times, noise.figures()["others_pct"]


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
            times: dict[str, list[float]] = {name: [] for name in engines}
            tries = 0
            while len(next(iter(times.values()))) < args.rounds and tries < 3 * args.rounds:
                tries += 1
                one, others = turn(engines, num_seqs, args.tokens)
                if others < MOST_OTHERS_PCT:
                    for name, ms in one.items():
                        times[name].append(ms)
            if not all(times.values()):
                raise SystemExit(f"others took more than {MOST_OTHERS_PCT} % in every round")
            base = next(iter(times.values()))
            for name, each in times.items():
                ratios = sorted(b / a for a, b in zip(base, each, strict=True))
                print(
                    f"| {num_seqs} | {name} | {statistics.median(each):.1f} "
                    f"({min(each):.1f}-{max(each):.1f}) | {statistics.median(ratios):.2f}x "
                    f"({ratios[0]:.2f}-{ratios[-1]:.2f}) |", flush=True,
                )  # fmt: skip


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
    two = commands.add_parser("passes", help="how soon a rank knows of a pass")
    two.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    two.add_argument("--passes", type=int, default=500)
    two.add_argument("--work-ms", type=float, default=5.0, help="of rank 0 between two passes")
    two.add_argument(
        "--ahead-us", type=float, default=200.0, help="from saying that a pass comes to its batch"
    )
    two.add_argument("--read-mb", type=int, default=0, help="that a rank reads in each pass")
    two.add_argument("--parts", action="store_true", help="say where the time goes, too")
    two.set_defaults(run=passes)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
