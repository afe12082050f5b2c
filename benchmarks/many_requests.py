"""What thousands of running requests cost beside the model: ``many_requests.py --running 64 1000 10000``.

Two parts, both without a model:

- ``scheduler``: one thread drives scheduler, cache manager and output processor; a stub in the worker's
  place answers with a token for each request. Columns are times of one step in which all requests run:
  the median and the longest of ``schedule``, ``update`` and ``outputs`` (taking the step's outputs in), and
  the longest pause of the garbage collector, all in milliseconds of the thread's processor time.
- ``engine``: ``LLM.generate`` on the simulated device, whose steps take no time: tokens per second, all
  threads included, by the clock and by the processor time of all threads (which is what to compare on a
  machine that is not idle), the longest step, and the longest pause.

The collector is set as in the server's own processes, unless ``--own-collector``: a program that uses
``LLM`` has its own.

Requests have prompts of 32 tokens and outputs of ``--output`` tokens, so blocks of 16 tokens fill up, and in
``scheduler`` requests end and others take their places, a few in each step.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.step import RequestStepResult, ScheduledStep, StepResult

PROMPT, BLOCK = 32, 16
STAGES = ("schedule", "update", "outputs")


@dataclass
class Pauses:
    """Pauses of the garbage collector, in milliseconds."""

    all: list[float] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        began, clock = 0.0, time.thread_time

        def watch(phase: str, _: dict[str, int]) -> None:
            nonlocal began
            if phase == "start":
                began = clock()
            else:
                self.all.append(1e3 * (clock() - began))

        gc.callbacks.append(watch)
        try:
            yield
        finally:
            gc.callbacks.remove(watch)

    def __str__(self) -> str:
        return f"{max(self.all, default=0.0):.1f} ms of {len(self.all)}"


class Driver:
    """Scheduler, cache and outputs, and nothing else, with ``running`` requests at a time.

    Args:
        running: requests.
        output: tokens of each; the first ones end earlier, so that ends are spread.
        steps_in_flight: 2 schedules a step while another runs.
        objects: each request's result is an object, as workers give it that say more than a token.
    """

    def __init__(self, running: int, output: int, steps_in_flight: int, objects: bool) -> None:
        from headrace_engine.config import SchedulerConfig
        from headrace_engine.kv.manager import PagedKVCacheManager
        from headrace_engine.output_processing.output_processor import OutputProcessor
        from headrace_engine.scheduler.scheduler import Scheduler

        blocks = running * (-(-(PROMPT + output + 20) // BLOCK) + 1) + 1
        group = KVCacheGroup(("layer",), FullAttentionSpec(BLOCK, 1, 1, "int8"))
        budget = max(8192, 2 * running)
        length = PROMPT + output + 21
        kv = PagedKVCacheManager(KVCacheConfig((blocks,), (group,)), True, length, budget)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=running,
                            async_scheduling=steps_in_flight > 1),
            kv,
            max_model_len=length,
        )  # fmt: skip
        self.processor = OutputProcessor(None)
        self.running, self.output = running, output
        self.steps_in_flight = steps_in_flight
        self.objects = objects
        self.times: dict[str, list[float]] = defaultdict(list)
        self._in_flight: deque[ScheduledStep] = deque()
        self._random = random.Random(0)
        self._added = 0
        for index in range(running):
            self._add(20 + output * (index + 1) // running)

    def _add(self, output: int) -> None:
        from headrace_engine.input_processing.prepared import PreparedRequest

        prompt = [self._random.randrange(1, 30000) for _ in range(PROMPT)]
        params = SamplingParams(
            max_tokens=output, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
        )
        name = f"request-{self._added}"
        self._added += 1
        core = CoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            params=params,
            stop_token_ids=frozenset((0,)),
            max_tokens=output,
            arrival_time=float(self._added),
        )
        self.processor.add(PreparedRequest(name, None, prompt, params, [core], 0.0))
        self.scheduler.add(core)

    def run(self, steps: int) -> None:
        """Run some steps; those in which nearly all requests take part count."""
        from headrace_engine.messages import CoreOutputs

        clock = time.thread_time
        for _ in range(steps):
            begin = clock()
            while len(self._in_flight) < self.steps_in_flight:
                step = self.scheduler.schedule()
                assert step is not None
                self._in_flight.append(step)
            scheduled = clock()
            step = self._in_flight.popleft()
            result = self._answer(step)
            tokens: dict[str, int] = {}
            told = () if self.objects else (tokens,)
            more = {} if self.objects else {"tokens": tokens}
            answered = clock()
            outputs = self.scheduler.update(step, result, *told)
            updated = clock()
            processed = self.processor.process(CoreOutputs(outputs, updated, None, "0", **more))
            ended = clock()
            if len(step.num_scheduled_tokens) > 0.9 * self.running:
                parts = (scheduled - begin, updated - answered, ended - updated)
                for stage, seconds in zip(STAGES, parts):
                    self.times[stage].append(1e3 * seconds)
                self.times["step"].append(1e3 * sum(parts))
            for state in processed.changed:
                if state.finished:
                    state.take()
                    self.processor.remove(state)
                    self._add(self.output)

    def _answer(self, step: ScheduledStep) -> StepResult:
        """The same token for everybody."""
        ids = step.num_scheduled_tokens
        if self.objects:
            return StepResult(step.step_id, {i: RequestStepResult([7]) for i in ids})
        return StepResult(step.step_id, {}, tokens=dict.fromkeys(ids, 7))


def measure_scheduler(running: int, output: int, steps: int, objects: bool) -> str:
    """A row of the first table."""
    driver = Driver(running, output, 2, objects)
    driver.run(20)  # prompts
    driver.times.clear()
    pauses = Pauses()
    with pauses.watched():
        driver.run(steps)
    times = driver.times
    cells = [f"{statistics.median(times[s]):.2f} ({max(times[s]):.2f})" for s in (*STAGES, "step")]
    return f"| {running} | {' | '.join(cells)} | {pauses} |"


def measure_engine(running: int, output: int, settings: dict[str, Any]) -> str:
    """A row of the second table."""
    from headrace import LLM, SamplingParams
    from headrace_engine.loop import EngineLoop

    ends: list[float] = []
    finish = EngineLoop._finish

    def finished(this: Any, *args: Any) -> None:
        finish(this, *args)
        ends.append(time.perf_counter())

    EngineLoop._finish = finished
    draw, pauses = random.Random(0), Pauses()
    settings = {"sim_step_ms": 0, "sim_token_us": 0, "max_model_len": 512, "max_num_seqs": running,
                "max_num_batched_tokens": max(8192, 2 * running)} | settings  # fmt: skip
    with LLM(device="sim", use_tqdm_on_load=False, **settings) as llm:
        prompts = [
            {"prompt_token_ids": [draw.randrange(5, 1000) for _ in range(PROMPT)]}
            for _ in range(running)
        ]
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        for _ in range(2):
            ends.clear()
            pauses.all.clear()
            with pauses.watched():
                begin, busy = time.perf_counter(), time.process_time()
                llm.generate(prompts, params, use_tqdm=False)
                seconds, busy = time.perf_counter() - begin, time.process_time() - busy
            llm.reset_prefix_cache()
    EngineLoop._finish = finish
    steps = [1e3 * (b - a) for a, b in itertools.pairwise(ends)]
    rate, per_busy = running * output / seconds, running * output / busy
    middle = f"{statistics.median(steps):.1f} ({max(steps):.1f})"
    return f"| {running} | {rate:.0f} | {per_busy:.0f} | {middle} | {len(steps) + 1} | {pauses} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--running", type=int, nargs="+", default=[64, 1000, 10000])
    parser.add_argument("--output", type=int, default=128, help="tokens of each request")
    parser.add_argument("--steps", type=int, default=100, help="steps of the scheduler's part")
    parser.add_argument("--part", choices=("scheduler", "engine", "both"), default="both")
    parser.add_argument("--objects", action="store_true", help="a result object for each request")
    parser.add_argument("--settings", type=json.loads, default={}, help="engine settings, JSON")
    parser.add_argument("--own-collector", action="store_true", help="leave the collector as it is")
    arguments = parser.parse_args()
    if not arguments.own_collector:
        from headrace_engine.startup import collector_paused

        with collector_paused(freeze=True):
            pass
    if arguments.part != "engine":
        print("| running | schedule, ms (longest) | update | outputs | step | pauses |")
        print("|---|---|---|---|---|---|")
        for running in arguments.running:
            print(
                measure_scheduler(running, arguments.output, arguments.steps, arguments.objects),
                flush=True,
            )
    if arguments.part != "scheduler":
        print(
            "\n| running | tokens/s | per processor second | step, ms (longest) | steps | pauses |"
        )
        print("|---|---|---|---|---|---|")
        for running in arguments.running:
            print(measure_engine(running, arguments.output, arguments.settings), flush=True)


if __name__ == "__main__":
    main()
