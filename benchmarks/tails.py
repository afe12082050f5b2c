"""Tails of latency beside throughput, in simulated time: ``tails.py --streams 8 32 --target-itl 0.12``.

The engine's own scheduler and cache manager serve a closed loop of streams; a step takes what a straight line
says (``--step-ms``, and so much for each request that decodes and for each prompt token), so that a run
takes seconds, is the same each time, and does not depend on what else the machine does. It says what targets
do to the order and the sizes of prompts. It says nothing of a real machine's times, of the front end or the
network: take those with ``headrace bench serve``.

One row for each number of streams and each setting: without targets, with either, and with both. Columns:
output tokens a second; median and 99th percentile of the time to the first token and of gaps between tokens,
in milliseconds. With ``--long`` every tenth prompt is so many times as long.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult
from headrace_engine.config import SchedulerConfig
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.scheduler.scheduler import Scheduler

BLOCK, CONTEXT = 16, 8192


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: so much, and more for each request that decodes and each prompt token."""

    step: float
    decoding: float
    prompt_token: float

    def seconds(self, step: ScheduledStep) -> float:
        """The time of a step."""
        counts = step.num_scheduled_tokens.values()
        return self.step + sum(
            self.decoding if count == 1 else self.prompt_token * count for count in counts
        )


class Loop:
    """A closed loop: whoever ends is followed by the next request at once.

    Args:
        args: the load, and the step's cost.
        streams: requests at a time.
        targets: settings of the scheduler.
    """

    def __init__(self, args: argparse.Namespace, streams: int, targets: dict[str, float]) -> None:
        self.now = 0.0
        self._args = args
        self._cost = StepCost(args.step_ms / 1e3, args.decoding_ms / 1e3, args.token_us / 1e6)
        self._random = random.Random(args.seed)
        self._left = args.requests_per_stream * streams
        self._streams = streams
        longest = 2 * (args.input * max(1, args.long) + args.output) + BLOCK
        blocks = streams * longest // BLOCK + 1
        group = KVCacheGroup(("layer",), FullAttentionSpec(BLOCK, 1, 1, "int8"))
        kv = PagedKVCacheManager(
            KVCacheConfig((blocks,), (group,)), True, CONTEXT, args.step_tokens
        )
        config = SchedulerConfig(
            max_num_batched_tokens=args.step_tokens, max_num_shared_tokens=args.shared_tokens,
            max_num_seqs=128, async_scheduling=True, **targets,
        )  # fmt: skip
        self._scheduler = Scheduler(config, kv, max_model_len=CONTEXT, clock=lambda: self.now)
        self._in_flight: deque[tuple[ScheduledStep, set[str]]] = deque()
        """With the requests whose prompts it leaves incomplete."""
        self._uncomputed: dict[str, int] = {}
        """Prompt tokens by request; there is room for all, so that nobody is preempted."""
        self._sent: dict[str, float] = {}
        self._tokens: dict[str, list[float]] = defaultdict(list)
        self._num_added = 0

    def run(self) -> list[float]:
        """Serve all: output tokens a second, then both latencies' median and 99th percentile in ms."""
        for _ in range(self._streams):
            self._add()
        while self._scheduler.has_unfinished:
            if not self._in_flight:
                self._schedule()
            self.now += self._cost.seconds(self._in_flight[0][0])
            self._schedule()
            self._land()
        ttfts = [times[0] - self._sent[name] for name, times in self._tokens.items()]
        itls = [b - a for times in self._tokens.values() for a, b in itertools.pairwise(times)]
        rate = sum(map(len, self._tokens.values())) / self.now
        return [rate, *_summary(ttfts), *_summary(itls)]

    def _add(self) -> None:
        if not self._left:
            return
        self._left -= 1
        args, draw = self._args, self._random
        spread = 1 + args.spread * (2 * draw.random() - 1)
        count = int(args.input * spread)
        if args.long and self._num_added % 10 == 9:
            count *= args.long
        output = max(2, int(args.output * (1 + args.spread * (2 * draw.random() - 1))))
        name = f"request-{self._num_added}"
        self._num_added += 1
        self._sent[name], self._uncomputed[name] = self.now, count
        self._scheduler.add(
            CoreRequest(
                request_id=name,
                prompt_token_ids=[draw.randrange(5, 30_000) for _ in range(count)],
                params=SamplingParams(max_tokens=output),
                stop_token_ids=frozenset(),
                max_tokens=output,
                arrival_time=float(self._num_added),
            )
        )

    def _schedule(self) -> None:
        step = self._scheduler.schedule()
        if step is None:
            return
        partial = set()
        for name, count in step.num_scheduled_tokens.items():
            self._uncomputed[name] -= count
            if self._uncomputed[name] > 0:
                partial.add(name)
        self._in_flight.append((step, partial))

    def _land(self) -> None:
        step, partial = self._in_flight.popleft()
        results = {
            name: RequestStepResult([] if name in partial else [7])
            for name in step.num_scheduled_tokens
        }
        for output in self._scheduler.update(step, StepResult(step.step_id, results)):
            self._tokens[output.request_id] += [self.now] * len(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.error is None, output.error
                self._add()


def _summary(seconds: Iterable[float]) -> list[float]:
    """Median and 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return [1e3 * statistics.median(ordered), 1e3 * last]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--requests-per-stream", type=int, default=8)
    parser.add_argument("--input", type=int, default=256, help="prompt tokens")
    parser.add_argument("--output", type=int, default=128, help="output tokens")
    parser.add_argument("--spread", type=float, default=0.0, help="of lengths, as a share")
    parser.add_argument("--long", type=int, default=0, help="every tenth prompt: times as long")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument(
        "--decoding-ms", type=float, default=3.0, help="for each request that decodes"
    )
    parser.add_argument("--token-us", type=float, default=1500.0, help="for each prompt token")
    parser.add_argument("--step-tokens", type=int, default=2048)
    parser.add_argument("--shared-tokens", type=int, default=512)
    parser.add_argument("--target-itl", type=float, help="seconds (default: twice a plain step)")
    parser.add_argument("--target-ttft", type=float, default=5.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| streams | targets | output tok/s | TTFT p50 | p99 | ITL p50 | p99 |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for streams in args.streams:
        plain = (args.step_ms + streams * args.decoding_ms) / 1e3
        itl = {"target_itl": args.target_itl or 2 * plain}
        ttft = {"target_ttft": args.target_ttft}
        for targets in ({}, itl, ttft, {**itl, **ttft}):
            said = ", ".join(f"{name[7:]} {value:g} s" for name, value in targets.items()) or "none"
            cells = " | ".join(f"{value:.0f}" for value in Loop(args, streams, targets).run())
            print(f"| {streams} | {said} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
