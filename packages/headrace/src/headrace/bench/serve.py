"""``headrace bench serve``: load on a running server, and what its users would see."""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.arguments import Parser, json_object
from headrace.bench import datasets, metrics, plots, results
from headrace.bench.arrivals import RampUp, send_times
from headrace.bench.backends import BACKENDS, Backend
from headrace.bench.datasets import Sample
from headrace.bench.http import Answer, Client, HttpError
from headrace.bench.load import Call, Load, Run
from headrace_core.errors import ConfigError, HeadraceError

SAMPLING = (
    ("temperature", float), ("top-p", float), ("top-k", int), ("min-p", float),
    ("frequency-penalty", float), ("presence-penalty", float), ("repetition-penalty", float),
)  # fmt: skip
"""Flags that become fields of every request."""

EPILOG = """\
Try:
  headrace serve                                            # in one terminal
  headrace bench serve --num-prompts 20 --random-input-len 64 --random-output-len 32   # in another

  # eight users at a time, outputs of full length, everything kept in a file, a picture beside it
  headrace bench serve --num-prompts 64 --max-concurrency 8 --ignore-eos --save-result --plot run.png

  # 4 requests a second that come in bursts; how many have their first token within 500 ms?
  headrace bench serve --request-rate 4 --burstiness 0.5 --goodput ttft:500 tpot:80

  # somebody else's server, real conversations
  headrace bench serve --base-url http://10.0.0.7:8000 --backend openai-chat --tokenizer /path/to/model \\
    --dataset-name sharegpt --dataset-path sharegpt.json --num-prompts 200

Figures: TTFT is the time to the first token, TPOT the mean time of each further token of a request, ITL
each single gap between tokens, E2EL the whole request. Tokens are counted by the server (usage)."""


class Unreachable(HeadraceError):
    """The server was not ready in time, or refuses what the benchmark asks."""


def main(words: Sequence[str]) -> int:
    args = make_parser().parse_args(words)
    settings = _checked(args)
    if args.plot:
        plots.check(args.plot)
    if _keeps(args):
        folder = results.make_folder(args.result_dir, "result_dir")
        if args.result_filename:
            results.check_output(folder / args.result_filename, "result_filename")
    backend = BACKENDS[args.backend]()
    tokenizer = datasets.read_tokenizer(args.tokenizer) if args.tokenizer else None
    plan = datasets.Plan(
        args.num_prompts or 1000,
        args.seed,
        tokenizer,
        not args.disable_shuffle,
        not args.no_oversample,
    )
    samples = datasets.load(args, plan)
    run, model = asyncio.run(_drive(args, backend, samples, settings))
    report = _report(args, run, samples, model, settings)
    print(_shown(args, report, settings))
    _say_oddities(run)
    _keep(args, report)
    if args.plot:
        plots.serving(run.outcomes, report, args.plot)
        results.say(f"picture: {args.plot}")
    return 0 if report["completed"] else 1


class Settings:
    """What the flags say, checked and in the types that are used."""

    def __init__(self, args: Namespace) -> None:
        self.measures = _names(args.percentile_metrics, "--percentile-metrics")
        if not BACKENDS[args.backend].streams:
            self.measures = [name for name in self.measures if name == "e2el"] or ["e2el"]
        self.percentiles = _numbers(args.metric_percentiles)
        self.limits = _limits(args.goodput)
        self.metadata = results.pairs(args.metadata, "--metadata")
        self.headers = results.pairs(args.header, "--header")
        if args.api_key:
            self.headers.setdefault("Authorization", f"Bearer {args.api_key}")
        self.ramp_up = _ramp_up(args)
        self.base_url: str = args.base_url or f"http://{args.host}:{args.port}"
        self.endpoint: str = args.endpoint or BACKENDS[args.backend].endpoint


def make_parser() -> Parser:
    """The parser of ``headrace bench serve``."""
    parser = Parser(
        prog="headrace bench serve",
        description="Send requests to a running OpenAI-compatible server and measure what comes back.",
        epilog=EPILOG,
    )
    _add_target(parser)
    datasets.add_arguments(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_output(parser)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Server")
    group.add_argument("--backend", choices=sorted(BACKENDS), default="openai",
                       help="openai (completions; headrace and vllm are the same), openai-chat or "
                       "openai-embeddings (default: openai)")  # fmt: skip
    group.add_argument(
        "--base-url", metavar="URL", help="in place of --host and --port, without /v1"
    )
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    group.add_argument(
        "--endpoint", metavar="PATH", help="(default: the backend's, /v1/completions, ...)"
    )
    group.add_argument("--model", help="(default: the first that the server lists)")
    group.add_argument("--served-model-name", metavar="NAME",
                       help="what the server calls it, if --model names something else")  # fmt: skip
    group.add_argument("--tokenizer", metavar="FOLDER",
                       help="of the model; prompts are then sent as text, not as token ids")  # fmt: skip
    group.add_argument("--lora-modules", nargs="+", metavar="NAME", default=[],
                       help="adapters that the server has; each request goes to one of them")  # fmt: skip
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY",
                       help="(default: $OPENAI_API_KEY)")  # fmt: skip
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="repeatable"
    )
    group.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    group.add_argument("--ready-check-timeout-sec", type=float, default=600.0, metavar="SECONDS",
                       help="wait so long for the server; 0 asks nothing first (default: 600)")  # fmt: skip
    group.add_argument("--request-timeout", type=float, default=3600.0, metavar="SECONDS",
                       help="a request that takes longer has failed (default: 3600)")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Load")
    group.add_argument("--request-rate", type=float, default=float("inf"), metavar="RPS",
                       help="requests a second; inf sends all at once (default: inf)")  # fmt: skip
    group.add_argument("--burstiness", type=float, default=1.0, metavar="SHAPE",
                       help="1: by chance (Poisson); below: in bursts; above: evenly (1)")  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="never more than N under way"
    )
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"),
                       help="let the rate rise from --ramp-up-start-rps to --ramp-up-end-rps")  # fmt: skip
    group.add_argument("--ramp-up-start-rps", type=float, metavar="RPS")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="RPS")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N",
                       help="requests before the measured ones (default: 0)")  # fmt: skip
    group.add_argument(
        "--seed", type=int, default=0, help="of prompts, lengths and times (default: 0)"
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Requests")
    group.add_argument(
        "--ignore-eos", action="store_true", help="outputs of full length (not every server)"
    )
    for name, kind in SAMPLING:
        group.add_argument(f"--{name}", type=kind, help="(default: the server's)")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="ask for the N likeliest of each token"
    )
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON",
                       help="further fields of every request")  # fmt: skip
    group.add_argument("--request-id-prefix", metavar="TEXT",
                       help="send X-Request-Id: TEXT0, TEXT1, ...")  # fmt: skip


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Report")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES",
                       help="(default: ttft,tpot,itl,e2el)")  # fmt: skip
    group.add_argument(
        "--metric-percentiles", default="99", metavar="P[,P...]", help="(default: 99)"
    )
    group.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS",
                       help="count requests that keep these, of ttft, tpot, e2el")  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument(
        "--save-detailed", action="store_true", help="with each request's times and text"
    )
    group.add_argument(
        "--append-result", action="store_true", help="add a line to the file instead"
    )
    group.add_argument(
        "--metadata", nargs="+", default=[], metavar="NAME=VALUE", help="kept in the file"
    )
    group.add_argument("--result-dir", default=".", metavar="FOLDER", help="(default: here)")
    group.add_argument(
        "--result-filename", metavar="FILE", help="(default: from model, load and time)"
    )
    group.add_argument("--label", help="what this run is called (default: the backend)")
    group.add_argument("--plot", metavar="FILE", help=plots.HELP)
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _checked(args: Namespace) -> Settings:
    for flag in ("max_concurrency", "num_prompts"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} {value}: must be at least 1", field=flag)
    return Settings(args)


def _ramp_up(args: Namespace) -> RampUp | None:
    if args.ramp_up_strategy is None:
        if args.ramp_up_start_rps is not None or args.ramp_up_end_rps is not None:
            raise ConfigError(
                "--ramp-up-start-rps and --ramp-up-end-rps: need --ramp-up-strategy linear or exponential",
                field="ramp_up_strategy",
            )
        return None
    if args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
        raise ConfigError(
            "--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps",
            field="ramp_up_start_rps",
        )
    if args.request_rate != float("inf"):
        raise ConfigError(
            f"--request-rate {args.request_rate:g}: must be left out with --ramp-up-strategy",
            field="request_rate",
        )
    return RampUp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)


def _names(text: str, flag: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in metrics.NAMES]
    if unknown or not names:
        raise ConfigError(f"{flag} {text!r}: must be of {', '.join(metrics.NAMES)}", field=flag[2:])
    return names


def _numbers(text: str) -> list[float]:
    try:
        percentiles = [float(word) for word in text.split(",")]
        if not all(0 <= percent <= 100 for percent in percentiles):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles {text!r}: must be numbers from 0 to 100 with commas between, as 50,90,99",
            field="metric_percentiles",
        ) from None
    return percentiles


def _limits(words: Sequence[str]) -> dict[str, float]:
    limits = {}
    for name, value in results.pairs(words, "--goodput", ":").items():
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits[name] < 0:
            raise ConfigError(
                f"--goodput {name}:{value}: must be ttft, tpot or e2el with milliseconds, as ttft:500",
                field="goodput",
            )
    return limits


async def _drive(
    args: Namespace, backend: Backend, samples: Sequence[Sample], settings: Settings
) -> tuple[Run, str]:
    """Wait for the server, warm it up, run the load; returns the run and the model's name."""
    client = Client(
        settings.base_url,
        headers=settings.headers,
        insecure=args.insecure,
        timeout=args.request_timeout,
    )
    try:
        model = args.served_model_name or args.model or await _first_model(client, args, settings)
        options = _options(args)
        if args.ready_check_timeout_sec > 0:
            body = backend.body(_probe(samples[0]), model, options)
            await _until_ready(client, settings, backend, body, args.ready_check_timeout_sec)
        calls = _calls(args, backend, samples, model, options)
        if args.num_warmups:
            warm = [calls[i % len(calls)] for i in range(args.num_warmups)]
            await Load(client, backend, settings.endpoint, warm, [0.0] * len(warm),
                       args.max_concurrency).run()  # fmt: skip
        times = send_times(
            len(calls), request_rate=args.request_rate, burstiness=args.burstiness,
            ramp_up=settings.ramp_up, seed=args.seed,
        )  # fmt: skip
        with results.progress(
            len(calls), "requests", "request", enabled=not args.disable_tqdm
        ) as bar:
            load = Load(client, backend, settings.endpoint, calls, times, args.max_concurrency,
                        on_end=bar.update)  # fmt: skip
            return await load.run(), model
    finally:
        client.close()


def _options(args: Namespace) -> dict[str, Any]:
    """Fields of every request, from the flags that were given."""
    options: dict[str, Any] = {}
    for name, _ in SAMPLING:
        field = name.replace("-", "_")
        if getattr(args, field) is not None:
            options[field] = getattr(args, field)
    if args.ignore_eos:
        options["ignore_eos"] = True
    if args.logprobs is not None:
        chat = args.backend == "openai-chat"
        options |= (
            {"logprobs": True, "top_logprobs": args.logprobs}
            if chat
            else {"logprobs": args.logprobs}
        )
    return {**options, **args.extra_body}


def _calls(
    args: Namespace,
    backend: Backend,
    samples: Sequence[Sample],
    model: str,
    options: Mapping[str, Any],
) -> list[Call]:
    models = args.lora_modules or [model]
    calls = []
    for index, sample in enumerate(samples):
        prefix = args.request_id_prefix
        headers = {} if prefix is None else {"X-Request-Id": f"{prefix}{index}"}
        body = backend.body(sample, models[index % len(models)], options)
        calls.append(Call(sample, body, headers))
    return calls


def _probe(sample: Sample) -> Sample:
    """A short request of the same kind: the readiness check must leave no measured prompt in a cache."""
    prompt: str | list[int] = "Hello" if isinstance(sample.prompt, str) else sample.prompt[-2:]
    return Sample(prompt, 2, None)


async def _first_model(client: Client, args: Namespace, settings: Settings) -> str:
    path = "/v1/models"

    async def ask() -> Answer:
        return await client.get(path)

    answer = await _answered(ask, settings.base_url + path, args.ready_check_timeout_sec)
    try:
        return str(answer.json()["data"][0]["id"])
    except (HttpError, KeyError, IndexError, TypeError):
        raise Unreachable(
            f"{settings.base_url}{path}: lists no model; name it with --model"
        ) from None


async def _until_ready(
    client: Client, settings: Settings, backend: Backend, body: bytes, seconds: float
) -> None:
    async def ask() -> Answer:
        return await client.post(settings.endpoint, body)

    answer = await _answered(ask, settings.base_url + settings.endpoint, seconds)
    probe = backend.outcome(answer, Sample("", 1, None), answer.started)
    if probe.error is not None and probe.error != "no token came":  # it may have ended at once
        raise Unreachable(f"{settings.base_url}{settings.endpoint}: {probe.error}")


async def _answered(ask: Any, url: str, seconds: float) -> Answer:
    """Ask until an answer that is no 5xx comes.

    Raises:
        Unreachable: none came within ``seconds``, or the server refuses.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer: Answer = await ask()
            problem = f"HTTP {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}"
            if answer.status == 200:
                return answer
            if answer.status < 500:
                raise Unreachable(f"{url}: {problem}")
        except HttpError as error:
            problem = str(error)
        if time.monotonic() >= deadline:
            raise Unreachable(f"{url}: not ready within {seconds:g} s ({problem})")
        await asyncio.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def _report(
    args: Namespace, run: Run, samples: Sequence[Sample], model: str, settings: Settings
) -> dict[str, Any]:
    figures = metrics.report(
        run.outcomes, run.ends, run.duration,
        measures=settings.measures, percentiles=settings.percentiles, limits=settings.limits,
    )  # fmt: skip
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    report: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label,
        "base_url": settings.base_url,
        "endpoint": settings.endpoint,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": len(samples),
        "request_rate": rate if settings.ramp_up is None else "ramp-up",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **settings.metadata,
        **figures,
        "errors": sorted({o.error for o in run.outcomes if o.error is not None}),
    }
    if settings.ramp_up is not None:
        report |= {f"ramp_up_{name}": getattr(args, f"ramp_up_{name}")
                   for name in ("strategy", "start_rps", "end_rps")}  # fmt: skip
    return report | (_details(run) if args.save_detailed else {})


def _details(run: Run) -> dict[str, Any]:
    """Each request's figures, in the order of the requests."""
    outcomes = run.outcomes
    return {
        "start_times": [o.started for o in outcomes],
        "input_lens": [o.num_prompt_tokens for o in outcomes],
        "output_lens": [o.num_output_tokens for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "tpots": [o.tpot for o in outcomes],
        "itls": [o.itls for o in outcomes],
        "e2els": [o.e2el for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "request_errors": [o.error for o in outcomes],
    }


def _shown(args: Namespace, report: Mapping[str, Any], settings: Settings) -> str:
    rows: list[tuple[str, str] | str] = [
        ("Model", str(report["model_id"])),
        ("Successful requests", str(report["completed"])),
        ("Failed requests", str(report["failed"])),
        ("Request rate, 1/s", str(report["request_rate"])),
        ("Most requests at once", str(report["max_concurrent_requests"])),
        ("Duration, s", f"{report['duration']:.2f}"),
        ("Input tokens", str(report["total_input_tokens"])),
        ("Generated tokens", str(report["total_output_tokens"])),
        ("Requests/s", f"{report['request_throughput']:.2f}"),
        ("Output tokens/s", f"{report['output_throughput']:.2f}"),
        ("Most output tokens in a second", f"{report['max_output_tokens_per_s']:.0f}"),
        ("Total tokens/s", f"{report['total_token_throughput']:.2f}"),
    ]
    if report["request_goodput"] is not None:
        kept = " ".join(args.goodput)
        rows.append((f"Goodput ({kept}), requests/s", f"{report['request_goodput']:.2f}"))
    rows += results.latency_rows(report, settings.measures, settings.percentiles)
    return results.table(args.label or "Serving", rows)


def _say_oddities(run: Run) -> None:
    """What a reader of the figures has to know."""
    errors: dict[str, int] = {}
    for outcome in run.outcomes:
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    for error, count in sorted(errors.items(), key=lambda item: -item[1])[:5]:
        results.say(f"{count} failed: {error}")
    served = [o for o in run.outcomes if o.error is None and o.num_output_tokens]
    tokens, chunks = sum(o.num_output_tokens for o in served), sum(o.num_chunks for o in served)
    if chunks and tokens > 1.02 * chunks:
        results.say(
            f"note: {tokens} tokens came in {chunks} events; throughput and TPOT count tokens, "
            "ITL is between events"
        )


def _keeps(args: Namespace) -> bool:
    return bool(args.save_result or args.save_detailed or args.append_result)


def _keep(args: Namespace, report: Mapping[str, Any]) -> None:
    if not _keeps(args):
        return
    name = args.result_filename or _file_name(args, report)
    path = Path(args.result_dir) / name
    results.write_json(path, report, append=args.append_result)
    results.say(f"results: {path}")


def _file_name(args: Namespace, report: Mapping[str, Any]) -> str:
    at_once = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = str(report["model_id"]).rstrip("/").rpartition("/")[2]
    label = args.label or args.backend
    return f"{label}-{report['request_rate']}qps{at_once}-{model}-{report['date']}.json"
