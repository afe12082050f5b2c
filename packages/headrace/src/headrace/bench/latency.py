"""``headrace bench latency``: one batch, offline, repeated."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.bench import offline_common as offline
from headrace.bench import plots, results
from headrace.engine_args import EngineArgs
from headrace.logs import configure
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.arguments import Parser
    from headrace.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)

EPILOG = """\
Prompts are random and new in each iteration; outputs have full length (end tokens are ignored). Prefix
caching is off unless you set --enable-prefix-caching.

Try:
  headrace bench latency --num-iters 5                                     # the demo model
  headrace bench latency /path/to/model --batch-size 1 --input-len 128 --output-len 128   # decoding
  headrace bench latency /path/to/model --batch-size 1 --input-len 2048 --output-len 1    # prompts
  headrace bench latency --output-json latency.json --plot latency.png"""


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    configure("WARNING")
    _check(args)
    if args.output_json:
        results.check_output(args.output_json, "output_json")
    if args.plot:
        plots.check(args.plot)
    with offline.engine(offline.engine_settings(args)) as llm:
        seconds = _measure(args, llm)
        model = llm.model_info.name
    report = _report(args, seconds, model)
    print(_shown(args, report))
    if args.output_json:
        results.write_json(args.output_json, report)
        results.say(f"results: {args.output_json}")
    if args.plot:
        title = f"{model}: {args.batch_size} x ({args.input_len} in, {args.output_len} out)"
        plots.histogram(seconds, args.plot, title=title, unit="s")
        results.say(f"picture: {args.plot}")
    return 0


def make_parser() -> Parser:
    """The parser of ``headrace bench latency``."""
    parser = offline.parser(
        "latency", "Time one batch of requests, offline, again and again.", EPILOG
    )
    for flag, default, text in (
        ("input-len", 32, "tokens of a prompt"), ("output-len", 128, "tokens of an output"),
        ("batch-size", 8, "prompts of the batch"), ("n", 1, "outputs of each prompt"),
        ("num-iters-warmup", 10, "iterations before the timed ones"),
        ("num-iters", 30, "timed iterations"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{flag}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--disable-detokenize", action="store_true", help="make no text of the outputs"
    )
    parser.add_argument(
        "--output-json", metavar="FILE", help="write avg_latency, latencies, percentiles"
    )
    parser.add_argument("--plot", metavar="FILE", help=plots.HELP)
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(enable_prefix_caching=False)
    return parser


def _check(args: Namespace) -> None:
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: must be at least 1", field=name)


def _measure(args: Namespace, llm: LLM) -> list[float]:
    """Seconds of each timed iteration."""
    below = offline.high_id(llm.model_info.vocab_size)
    params = offline.full_length(args.output_len, detokenize=not args.disable_detokenize, n=args.n)

    def iteration(seed: int) -> float:
        samples = offline.random_prompts(args.batch_size, args.input_len, seed, below)
        prompts = [offline.prompt_of(sample) for sample in samples]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    total = args.num_iters_warmup + args.num_iters
    with results.progress(total, "iterations", "it", enabled=not args.disable_tqdm) as bar:
        seconds = [_counted(iteration, seed, bar) for seed in range(total)]
    return seconds[args.num_iters_warmup :]


def _counted(iteration: Callable[[int], float], seed: int, bar: results.Bar) -> float:
    seconds = iteration(seed)
    bar.update(1)
    return seconds


def _report(args: Namespace, seconds: list[float], model: str) -> dict[str, Any]:
    mean = statistics.fmean(seconds)
    return {
        "model": model,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "batch_size": args.batch_size,
        "n": args.n,
        "avg_latency": mean,
        "latencies": seconds,
        "percentiles": offline.figures_of(seconds, PERCENTILES),
        "output_tokens_per_second": args.batch_size * args.n * args.output_len / mean,
        **offline.machine(),
    }


def _shown(args: Namespace, report: dict[str, Any]) -> str:
    percentiles = report["percentiles"]
    return results.table(
        "Latency of a batch",
        [
            ("Model", report["model"]),
            ("Batch", f"{args.batch_size} x ({args.input_len} in, {args.output_len} out)"),
            ("Iterations", str(len(report["latencies"]))),
            ("Mean, s", f"{report['avg_latency']:.4f}"),
            *((f"P{name}, s", f"{value:.4f}") for name, value in percentiles.items()),
            ("Lowest to highest", results.sparkline(report["latencies"])),
            ("Output tokens/s", f"{report['output_tokens_per_second']:.2f}"),
            ("ms for each output token of the batch",
             f"{1e3 * report['avg_latency'] / args.output_len:.3f}"),
        ],
    )  # fmt: skip
