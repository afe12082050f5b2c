"""What a captured step saves: decode steps run eagerly and replayed, and what one op's call costs.

    python benchmarks/captured_step.py MODEL_FOLDER [--batch 1 8 32] [--context 128] [--steps 30]

Eager and replayed steps alternate, on the same requests. ``call`` is what replaying costs beside the
kernels: a replay of no call at all. Times are of the forward pass and the logits, without sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.assembly import resolve_engine, worker_factory
from headrace.engine_args import EngineArgs
from headrace_core.kv import KVCacheConfig
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import NewRequest, ScheduledStep
from headrace_engine.kv.grouping import plan_groups
from headrace_engine.startup import StartupTimeline
from headrace_engine.weights.worker import ModelWorker


def median_us(run: Callable[[], Any], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def make_worker(model: str, batch: int, context: int) -> ModelWorker:
    settings = {"model": model, "max_model_len": 2 * context, "skip_tokenizer_init": True}
    config = EngineArgs(use_tqdm_on_load=False, **settings).create_engine_config()
    worker = worker_factory(resolve_engine(config), StartupTimeline())()
    worker.load()
    groups = plan_groups(worker.kv_specs())
    blocks = 2 * context // groups[0].spec.block_size * batch * len(groups) + 1
    worker.allocate_cache(KVCacheConfig((blocks,), groups))
    worker.warm_up()
    return worker


def add_requests(worker: ModelWorker, batch: int, context: int, groups: int, size: int) -> None:
    """Requests of ``context`` tokens, computed."""
    per_request = 2 * context // size
    for number in range(batch):
        first = 1 + number * per_request * groups
        blocks = tuple(
            list(range(first + g * per_request, first + (g + 1) * per_request))
            for g in range(groups)
        )
        request = CoreRequest(
            request_id=str(number),
            prompt_token_ids=[3 + (7 * i + number) % 250 for i in range(context)],
            params=SamplingParams(temperature=0, max_tokens=context),
            stop_token_ids=frozenset(),
            max_tokens=context,
            arrival_time=0.0,
        )
        new = NewRequest(request, request.prompt_token_ids, blocks)
        worker.execute(ScheduledStep(number, {str(number): context}, new_requests=[new]))


@torch.inference_mode()
def decode(
    worker: ModelWorker, batch: int, context: int, steps: int
) -> tuple[float, float, float, dict[str, float]]:
    """Medians in microseconds: eager, replayed, and a replay of nothing; each kernel's part of a replay."""
    runner = worker._ready()
    add_requests(worker, batch, context, len(runner.backends), runner.block_size)
    scheduled = {str(number): 1 for number in range(batch)}
    inputs = runner.inputs.build(scheduled)
    graph: Any = runner.graph
    assert graph is not None, "nothing was captured"
    assert inputs.batch is not None
    eager, replayed, calls = [], [], []
    for _ in range(steps):
        eager.append(median_us(lambda: runner._run_eagerly(inputs, inputs.batch), 1))
        replayed.append(median_us(lambda: runner._replay(inputs, inputs.batch), 1))
        calls.append(graph.call_times(inputs.batch))
    expected = runner._run_eagerly(inputs, inputs.batch)[1]
    assert torch.equal(runner._replay(inputs, inputs.batch), expected)
    bucket = graph._bucket_of(inputs.batch)
    graph._buckets = (bucket._replace(pointers=(bucket.pointers[0], 0, *bucket.pointers[2:])),)
    nothing = median_us(lambda: runner._replay(inputs, inputs.batch), 200)
    return statistics.median(eager), statistics.median(replayed), nothing, parts_of(calls)


def parts_of(steps: list[list[tuple[str, int]]]) -> dict[str, float]:
    """Kernel -> microseconds of a step, as the sum of its calls' medians."""
    parts: dict[str, float] = {}
    for calls in zip(*steps):
        name = calls[0][0]
        parts[name] = parts.get(name, 0.0) + statistics.median(time for _, time in calls) / 1e3
    return parts


def op_calls(ops: OpTable) -> dict[str, float]:
    """Median microseconds of calls whose kernels have next to nothing to do."""
    x, weight = torch.zeros(1, 8), torch.ones(8)
    packed = ops.linear.pack(torch.zeros(8, 8))
    calls = {
        "embedding": lambda: ops.embedding(torch.zeros(1, dtype=torch.int64), x),
        "rms_norm": lambda: ops.rms_norm(x, weight, 1e-6),
        "add_rms_norm": lambda: ops.add_rms_norm(x, x, weight, 1e-6),
        "activation_and_mul": lambda: ops.activation_and_mul(x, "silu"),
        "linear": lambda: ops.linear(x, packed),
    }
    return {name: median_us(run, 3000) for name, run in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--calls", action="store_true", help="print the time of each kernel's calls"
    )
    options = parser.parse_args()
    print("| batch | eager, ms | replayed, ms | saved, ms | call, us |")
    print("|---|---|---|---|---|")
    for batch in options.batch:
        worker = make_worker(options.model, batch, options.context)
        eager, replayed, nothing, parts = decode(worker, batch, options.context, options.steps)
        graph: Any = worker._ready().graph
        calls, mebibytes = graph.num_calls, graph.num_bytes / 2**20
        worker.close()
        print(
            f"| {batch} | {eager / 1e3:.3f} | {replayed / 1e3:.3f} "
            f"| {(eager - replayed) / 1e3:.3f} | {nothing:.1f} |",
            flush=True,
        )
        if options.calls:
            times = sorted(parts.items(), key=lambda part: -part[1])
            print(", ".join(f"{name} {spent:.0f} us" for name, spent in times), flush=True)
    print(f"{calls} kernel calls a step, {mebibytes:.1f} MiB of intermediate results")
    for name, microseconds in op_calls(bind_ops(KernelNeed("cpu", "float32"))).items():
        print(f"{name}: {microseconds:.2f} us a call")


if __name__ == "__main__":
    main()
