"""What a step costs beside its kernels: ``overhead.py MODEL --batch 1 8 32 64 --mode serve``.

Runs one engine in this process, with N equal requests at once, and looks only at the steps in which all
of them decode. The functions at the seams of the engine are wrapped by stop-watches; what the three threads
(worker, engine, front end) use of the processor is read from their own clocks, so that work is seen also
where no watch stands. In ``serve`` mode the requests come through HTTP from a client in another process.

The table has one column per batch size. A *step* is the time from one forward pass to the next:

- ``forward``: inside the model, the vocabulary's matrix and the attention's metadata included;
- ``worker: ...``: what else the worker's thread does between two forwards; this is what a step waits for;
- ``worker: idle``: the worker had nothing to do, or waited for the interpreter;
- ``engine: ...``, ``front: ...``: processor time of the other threads beside the forward: nobody waits for
  it, but it takes a core from the kernels while it lasts.

``share outside`` is 1 - forward / step. With ``--sleep MS`` a step sleeps instead of running the model: what
is left is the processor time of the path around the kernels, without threads taking cores from one another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "driven"))
import workloads

PROMPT, OUTPUT = 64, 128
"""Tokens of each request."""
Totals = dict[str, float]


class Watches:
    """Stop-watches on functions: seconds by name, nested ones counted once, in the innermost."""

    def __init__(self) -> None:
        self.totals: Totals = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self._local = threading.local()

    def put(self, owner: Any, name: str, stage: str, *, cpu: bool = False) -> None:
        """Watch ``owner.name``; by the thread's processor time instead of the clock if ``cpu``."""
        function: Callable[..., Any] = getattr(owner, name)
        clock = time.thread_time if cpu else time.perf_counter

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent = clock() - start
                nested = stack.pop()
                if stack:
                    stack[-1] += spent
                self.totals[stage] += spent - nested
                self.counts[stage] += 1

        setattr(owner, name, watched)


class Probe:
    """Watches an engine and keeps the totals of the steps in which a whole batch decodes.

    Args:
        pause: seconds that a step sleeps instead of running the model; None runs it.
    """

    def __init__(self, pause: float | None = None) -> None:
        self._pause = pause
        self.watches = Watches()
        self.batch = 0
        self.steps: list[float] = []
        self._begin: Totals | None = None
        self._end: Totals | None = None
        self._front = threading.get_ident()
        self._install()

    def expect(self, batch: int) -> None:
        """Forget what was seen; from now on look at steps of that many decoding requests."""
        self.batch, self.steps, self._begin, self._end = batch, [], None, None

    def figures(self) -> Totals:
        """Microseconds per step, by stage."""
        if self._begin is None or self._end is None or len(self.steps) < 3:
            raise RuntimeError(f"no run of steps in which {self.batch} requests decode was seen")
        steps = len(self.steps) - 1
        found = {k: 1e6 * (v - self._begin.get(k, 0.0)) / steps for k, v in self._end.items()}
        times = [1e6 * (b - a) for a, b in zip(self.steps, self.steps[1:])]
        found["step (median)"] = statistics.median(times)
        return found

    def _install(self) -> None:
        from headrace_engine.execution import runner
        from headrace_engine.loop import EngineLoop
        from headrace_engine.output_processing.output import RequestState
        from headrace_engine.output_processing.output_processor import OutputProcessor
        from headrace_engine.scheduler.scheduler import Scheduler

        put = self.watches.put
        put(runner.ModelRunner, "execute", "worker: rest")
        put(runner.ModelRunner, "apply_changes", "worker: changes")
        put(runner.InputBuilder, "build", "worker: inputs")
        if self._pause is not None:
            pause = self._pause
            runner.ModelRunner._forward = lambda _, inputs: _asleep(inputs, pause)
        put(runner.ModelRunner, "_forward", "forward")
        put(runner.ModelRunner, "_sample", "worker: sampling")
        put(Scheduler, "schedule", "engine: schedule", cpu=True)
        put(Scheduler, "update", "engine: update", cpu=True)
        put(EngineLoop, "_emit", "engine: emit", cpu=True)
        put(OutputProcessor, "process", "front: text", cpu=True)
        put(RequestState, "take", "front: outputs")
        self._watch_steps(runner)

    def _watch_steps(self, runner: Any) -> None:
        forward = runner.ModelRunner._forward

        @functools.wraps(forward)
        def counted(this: Any, inputs: Any) -> Any:
            batch = inputs.batch
            if self.batch and batch.num_tokens == batch.num_seqs == self.batch:
                self.steps.append(time.perf_counter())
                self._end = self._now()
                self._begin = self._begin or self._end
            return forward(this, inputs)

        runner.ModelRunner._forward = counted

    def _now(self) -> Totals:
        totals = dict(self.watches.totals)
        totals["step"] = time.perf_counter()
        for thread in threading.enumerate():
            name = {"headrace-worker": "worker", "headrace-engine": "engine"}.get(thread.name)
            if thread.ident == self._front:
                name = "front"
            if name is not None and thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                totals[f"{name}: processor"] = time.clock_gettime(clock)
        return totals


def _asleep(inputs: Any, pause: float) -> Any:
    """In the place of a forward pass: the same token for everybody, and no processor time."""
    import torch

    time.sleep(pause)
    logits = torch.zeros(len(inputs.sampled), 1024)
    logits[:, 700] = 1.0
    return logits, logits if len(logits) else None, pause


def requests(batch: int, salt: int) -> list[workloads.Request]:
    """Equal lengths, so that all decode together."""
    return [
        workloads.Request(workloads.prompt(PROMPT, "overhead", salt, batch, i), OUTPUT)
        for i in range(batch)
    ]


def run_offline(
    model: str, batches: list[int], settings: dict[str, Any], pause: float | None
) -> dict[int, Totals]:
    """``LLM.generate`` on token ids, text included."""
    from headrace import LLM, SamplingParams

    probe, found = Probe(pause), {}
    with LLM(model=model, use_tqdm_on_load=False, **settings) as llm:
        for salt, batch in enumerate([*batches[-1:], *batches]):
            probe.expect(batch)
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
            prompts = [{"prompt_token_ids": r.prompt} for r in requests(batch, salt)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            found[batch] = probe.figures()
            found[batch]["wall"] = 1e6 * (time.perf_counter() - start)
    return {batch: found[batch] for batch in batches}


def run_served(
    model: str, batches: list[int], settings: dict[str, Any], pause: float | None
) -> dict[int, Totals]:
    """The HTTP server and the engine in this process, the client in another."""
    from headrace.assembly import connect
    from headrace.engine_args import EngineArgs
    from headrace_server import ServerSettings, create_app
    from headrace_server.protocols.openai import completions
    from headrace_server.run import serve

    probe, found = Probe(pause), {}
    probe.watches.put(completions, "event", "front: JSON")
    engine = connect(EngineArgs(model=model, use_tqdm_on_load=False, log_stats=False, **settings)
                     .create_engine_config())  # fmt: skip
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(2048)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"

    async def drive() -> None:
        app = create_app(engine, ServerSettings(disable_uvicorn_access_log=True))
        serving = asyncio.create_task(serve(app, sock, ServerSettings()))
        try:
            await asyncio.sleep(0.2)
            for salt, batch in enumerate([*batches[-1:], *batches]):
                probe.expect(batch)
                client = await asyncio.create_subprocess_exec(
                    sys.executable, __file__, url, "--client", str(batch), "--salt", str(salt),
                    stdout=subprocess.PIPE,
                )  # fmt: skip
                answer, _ = await client.communicate()
                found[batch] = probe.figures()
                found[batch]["wall"] = 1e6 * json.loads(answer)["wall"]
        finally:
            app.state.headrace.lifecycle.begin_drain()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    asyncio.run(drive())
    return {batch: found[batch] for batch in batches}


def run_client(url: str, batch: int, salt: int) -> None:
    """The client's process: all requests at once, as ``headrace bench serve`` sends them."""
    from headrace.bench.backends import BACKENDS
    from headrace.bench.datasets import SampleRequest
    from headrace.bench.http import Client
    from headrace.bench.load import LoadGenerator, PreparedRequest

    async def drive() -> float:
        client = Client(url)
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        backend = BACKENDS["openai"]()
        samples = [SampleRequest(r.prompt, OUTPUT, PROMPT) for r in requests(batch, salt)]
        options = {"temperature": 0.0, "ignore_eos": True}
        calls = [PreparedRequest(s, backend.body(s, model, options), {}) for s in samples]
        run = await LoadGenerator(client, backend, backend.endpoint, calls, [0.0] * batch).run()
        client.close()
        assert all(outcome.num_output_tokens == OUTPUT for outcome in run.outcomes)
        return run.duration

    print(json.dumps({"wall": asyncio.run(drive())}))


def add_rest(figures: Totals) -> None:
    """What no watch saw: idle time of the worker, processor time of the others."""
    known = defaultdict(float)
    for name, value in figures.items():
        thread, _, stage = name.partition(":")
        if stage and stage != " processor":
            known[thread] += value
    figures["worker: idle"] = figures["step"] - figures["forward"] - known["worker"]
    for thread in ("engine", "front"):
        figures[f"{thread}: rest"] = figures.get(f"{thread}: processor", 0.0) - known[thread]


def table(found: dict[int, Totals]) -> Iterator[str]:
    """Microseconds and share of a step, a column per batch size."""
    for figures in found.values():
        add_rest(figures)
    names = ["step", "step (median)", "forward"]
    names += sorted({n for f in found.values() for n in f if ":" in n})
    yield "| stage | " + " | ".join(f"batch {batch}" for batch in found) + " |"
    yield "|---" * (len(found) + 1) + "|"
    for name in names:
        cells = [
            f"{f.get(name, 0.0):.0f} us ({f.get(name, 0.0) / f['step']:.1%})"
            for f in found.values()
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"
    shares = [f"{1 - f['forward'] / f['step']:.1%}" for f in found.values()]
    yield "| share outside | " + " | ".join(shares) + " |"
    rates = [f"{batch * OUTPUT * 1e6 / f['wall']:.0f}" for batch, f in found.items()]
    yield "| output tokens/s, whole run | " + " | ".join(rates) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--mode", choices=("offline", "serve"), default="offline")
    parser.add_argument("--settings", type=json.loads, default={}, help="engine settings, JSON")
    parser.add_argument("--sleep", type=float, default=0.0, help="ms that a step sleeps instead")
    parser.add_argument("--client", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--salt", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        run_client(arguments.model, arguments.client, arguments.salt)
        return
    run = run_offline if arguments.mode == "offline" else run_served
    settings = {"max_model_len": 2048} | arguments.settings
    pause = arguments.sleep / 1e3 if arguments.sleep else None
    print(f"{arguments.mode}, {arguments.model}, {settings}")
    for line in table(run(arguments.model, arguments.batch, settings, pause)):
        print(line)


if __name__ == "__main__":
    main()
