"""``headrace bench scaling``: what more threads give here, beside what the model of scaling predicts.

See :mod:`headrace.planning.scaling` for the model, :mod:`headrace.bench.machine_numbers` for what is measured
of the machine, and :mod:`headrace.bench.scaling_verdicts` for how a difference is explained.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench import offline_common as offline
from headrace.bench import results
from headrace.bench.machine_numbers import MachineMeter, Measured, Topology, this_topology
from headrace.bench.scaling_report import Row, report_facts, shown
from headrace.bench.scaling_run import EngineTimes, ScalingWork
from headrace.bench.scaling_verdicts import verdicts
from headrace.engine_args import EngineArgs
from headrace.logs import configure
from headrace.planning.machine import Machine, parse_machine
from headrace.planning.scaling import Layout, Overhead, ScalingRow, table_of
from headrace_core.errors import ConfigError, EngineError
from headrace_engine.cores import format_cores, most_threads

if TYPE_CHECKING:
    from headrace.arguments import Parser
    from headrace.planning.model_shape import ModelShape

TYPICAL = Overhead(step=6e-4, request=1.5e-5)
"""Python's part of a step where none is measured (``--machine``): assumed."""
LONGEST = 3600.0
"""Seconds until an engine that answers nothing has failed."""
BUSY = 0.5
"""Threads that run, on an average of the last minute, above which the machine is said to be busy."""
EPILOG = """\
Measures this machine first (what 1, 2, 4, ... cores read and multiply, what a meeting of threads costs),
reckons from these numbers and the model's sizes what decoding and a prompt should take with each number of
threads, then runs the engine with each and prints both. Python's part of a step is taken from the run with
the fewest threads. Where the measured time is more than 20 % from the predicted one, a line says which
assumption is off. On a machine with several NUMA nodes, a rank on each node (-tp) is measured beside one
process.

Try:
  headrace bench scaling                                              # the demo model, no download
  headrace bench scaling /path/to/model --threads 1,2,4,8,16,32,64
  headrace bench scaling /path/to/model --batch-sizes 1 --prompt-len 512   # quicker, with large models
  headrace bench scaling /path/to/model --output-json scaling.json    # to send to somebody
  headrace bench scaling /path/to/model --machine '{"nodes": 2, "cores": 32, "core_read": 14e9,
      "node_read": 200e9, "far_core_read": 8e9, "link": 60e9, "core_products": 400e9}'   # only reckon

Run it while nothing else runs. docs/scaling-model.md has predictions for 2 x 32 cores, never checked."""


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    configure("WARNING")
    if args.output_json:
        results.check_output(args.output_json, "output_json")
    settings = offline.engine_settings(args)
    _check(args, settings)
    shapes = ShapesOf(settings)
    described = None if args.machine is None else parse_machine(args.machine)
    if described is None:
        rows, machine, report = _measured(args, settings, shapes)
    else:
        machine = described
        rows, report = _predicted(args, shapes, machine)
    print(shown(shapes.name, machine, rows, measured=described is None))
    if args.output_json:
        results.write_json(args.output_json, report)
        results.say(f"results: {args.output_json}")
    return 0


def make_parser() -> Parser:
    """The parser of ``headrace bench scaling``."""
    from headrace.arguments import json_object

    parser = offline.parser(
        "scaling",
        "Time decoding and prompts with 1, 2, 4, ... threads, beside predictions.",
        EPILOG,
    )
    parser.add_argument("--threads", type=numbers, metavar="N,N,...",
                        help="numbers of threads, of all ranks together (default: 1, 2, 4, ... and one for "
                        "each core)")  # fmt: skip
    parser.add_argument("--batch-sizes", type=numbers, default=(1, 8, 32), metavar="N,N,...",
                        help="requests that decode at once (default: 1,8,32)")  # fmt: skip
    parser.add_argument("--output-len", type=int, default=32,
                        help="tokens that each of them gets (default: 32)")  # fmt: skip
    parser.add_argument("--prompt-len", type=int, default=2048,
                        help="tokens of the prompt that is timed; fewer where the context is shorter "
                        "(default: 2048)")  # fmt: skip
    parser.add_argument("--machine", type=json_object, metavar="JSON",
                        help="only reckon, for a machine with these numbers: nodes, cores (of a node), "
                        "core_read, node_read, far_core_read, link (bytes/s), core_products, "
                        "core_few_products (operations/s), start, line, far_line (seconds), cache (bytes of "
                        "a node), core_cache_read, panel")  # fmt: skip
    parser.add_argument(
        "--output-json", metavar="FILE", help="write machine, times and verdicts here"
    )
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,8`` -> (1, 2, 8), ascending, each once."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ArgumentTypeError(f"{text!r}: must be whole numbers above 0 with commas, as 1,2,8")
    return tuple(sorted({int(word) for word in words}))


def default_threads(most: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to ``most``, and that."""
    return tuple(sorted({*(2**power for power in range(most.bit_length())), most}))


_OURS = ("num_threads", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
         "prefill_context_parallel_size")  # fmt: skip


def _check(args: Namespace, settings: Mapping[str, Any]) -> None:
    for name, least in (("output_len", 2), ("prompt_len", 1)):
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: must be at least {least}", field=name)
    for name in _OURS:
        if settings.get(name) is not None:
            raise ConfigError(
                f"{name} = {settings[name]!r}: must be left out: this benchmark sets it, see --threads",
                field=name,
            )
    if settings.get("device") not in (None, "auto", "cpu"):
        raise ConfigError(
            f"device = {settings['device']!r}: must be cpu: threads are the CPU's", field="device"
        )


class ShapesOf:
    """A checkpoint's shape for each number of ranks; the model is built without weights.

    Raises:
        HeadraceError: the model cannot be planned.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from headrace.assembly.resolved import resolve_engine
        from headrace.planning.rank_model import RankModels

        config = EngineArgs(**{**settings, "device": "cpu"}).create_engine_config()
        self._resolved = resolve_engine(config)
        self._models = RankModels(self._resolved)
        self.name = self._resolved.info.name
        self.dtype = self._resolved.info.dtype
        self.max_model_len = self._resolved.info.max_model_len
        self.free_memory = self._resolved.platform.available_memory()

    def __call__(self, ranks: int) -> ModelShape:
        from headrace.planning.model_shape import shape_of

        config, item = self._resolved.info.config, self._models.item_bytes
        return shape_of(self._models.of(ranks), config, item, ranks)


def work_of(args: Namespace, max_model_len: int) -> ScalingWork:
    """What is timed of a model with such a context.

    Raises:
        ConfigError: the context is too short for the outputs.
    """
    if args.output_len > max_model_len - 2:
        raise ConfigError(
            f"--output-len {args.output_len}: must be at most {max_model_len - 2}: the model's context is "
            f"{max_model_len} tokens",
            field="output_len",
        )
    # So short that the prompts of a batch are one step.
    input_len = min(16, max_model_len - args.output_len - 1)
    prompt = min(args.prompt_len, max_model_len - 1)
    return ScalingWork(tuple(args.batch_sizes), input_len, args.output_len, prompt)


def _predicted(
    args: Namespace, shapes: ShapesOf, machine: Machine
) -> tuple[list[Row], dict[str, Any]]:
    threads = args.threads or default_threads(machine.all_cores)
    table = table_of(
        shapes, machine, threads, TYPICAL, batches=args.batch_sizes, prompt=args.prompt_len
    )
    rows = [Row(each) for each in table]
    return rows, report_facts(shapes.name, machine, TYPICAL, rows)


def _measured(
    args: Namespace, settings: Mapping[str, Any], shapes: ShapesOf
) -> tuple[list[Row], Machine, dict[str, Any]]:
    topology, work = this_topology(), work_of(args, shapes.max_model_len)
    most = min(most_threads(), len(topology.evened))
    threads = args.threads or default_threads(most)
    if threads[-1] > most:
        raise ConfigError(
            f"--threads {threads[-1]}: must be at most {most}: one for each physical core that this process "
            f"may use (cores {format_cores(topology.evened)})",
            field="threads",
        )
    _warn_if_busy()
    step_bytes = shapes(1).weight_bytes(1)
    meter = MachineMeter(topology, shapes.dtype, shapes.free_memory, step_bytes)
    runs = [(count, layout) for count in threads for layout in _run_layouts(topology, count)]
    with results.progress(meter.steps(threads) + len(runs), "scaling", "measurement",
                          enabled=not args.disable_tqdm) as bar:  # fmt: skip
        measured = meter.measure(threads, bar)
        times: dict[tuple[int, Layout], EngineTimes] = {}
        for count, layout in runs:
            ours = run_settings(settings, work, topology, count, layout)
            times[count, layout] = _run(ours, work)
            bar.update(1)
    overhead = overhead_of(times[runs[0]])
    table = table_of(shapes, measured.machine, threads, overhead, batches=work.batches,
                     context=work.input_len + work.output_len // 2, prompt=work.prompt_len)  # fmt: skip
    rows = _with_verdicts(table, times, measured, shapes, overhead)
    facts = report_facts(shapes.name, measured.machine, overhead, rows, measured.by_threads)
    return rows, measured.machine, {**facts, "work": work._asdict(), **offline.machine()}


def _warn_if_busy() -> None:
    """Say so if others run: what is measured beside them is theirs as much as ours."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > BUSY:
        results.say(
            f"warning: about {load:.1f} threads of others run on this machine (load average): run this "
            "benchmark again without them before its verdicts are believed"
        )


def _run_layouts(topology: Topology, threads: int) -> list[Layout]:
    nodes = len(topology.nodes)
    several = nodes > 1 and threads % nodes == 0
    return [Layout.ONE_PROCESS, *([Layout.RANK_PER_NODE] if several else [])]


def run_settings(
    settings: Mapping[str, Any], work: ScalingWork, topology: Topology, threads: int, layout: Layout
) -> dict[str, Any]:
    """Settings of an engine: the user's, with so many threads, bound where there are several nodes."""
    ranks = len(topology.nodes) if layout is Layout.RANK_PER_NODE else 1
    cores = topology.each(threads) if ranks > 1 else topology.first(threads)
    longest = max(work.prompt_len, work.input_len + work.output_len)
    ours: dict[str, Any] = {
        "max_num_seqs": max(work.batches),
        "max_num_batched_tokens": max(2048, work.prompt_len),
        "max_model_len": longest + 1,
        **settings,
        "device": "cpu",
        "num_threads": threads,
        "collect_detailed_traces": ["model"],
        "use_tqdm_on_load": False,
    }
    if ranks > 1:
        ours["tensor_parallel_size"] = ranks
    if cores and settings.get("cpu_bind") is None:
        ours["cpu_bind"] = format_cores(cores)
    return ours


def _run(settings: Mapping[str, Any], work: ScalingWork) -> EngineTimes:
    argv = [sys.executable, "-m", "headrace.bench.scaling_run", json.dumps(dict(settings)),
            json.dumps(work._asdict())]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = lines[-1] if lines else "it printed nothing"
        raise EngineError(f"the engine with {settings['num_threads']} threads failed: {said}")
    return EngineTimes.of_facts(json.loads(done.stdout))


def overhead_of(times: EngineTimes) -> Overhead:
    """Python's part of a step, from batches of several sizes."""
    fewest, most = min(times.decode), max(times.decode)
    least = times.decode[fewest].python
    if most == fewest:
        return Overhead(least)
    request = max(0.0, (times.decode[most].python - least) / (most - fewest))
    return Overhead(max(0.0, least - request * fewest), request)


def _with_verdicts(
    table: Sequence[ScalingRow],
    times: Mapping[tuple[int, Layout], EngineTimes],
    measured: Measured,
    shape_of: Callable[[int], ModelShape],
    overhead: Overhead,
) -> list[Row]:
    rows = []
    for each in table:
        found = times.get((each.threads, each.layout))
        told = () if found is None else verdicts(each, found, measured, shape_of, overhead)
        rows.append(Row(each, found, tuple(told)))
    return rows
