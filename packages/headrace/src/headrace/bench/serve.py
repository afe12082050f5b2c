"""``headrace bench serve``: load on a running server, and what its users would see."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from headrace.bench import datasets, metrics, plots, results
from headrace.bench.arrivals import send_times
from headrace.bench.backends import BACKENDS, Backend
from headrace.bench.datasets import SampleRequest
from headrace.bench.http import Client, HttpError, HttpResponse
from headrace.bench.load import LoadGenerator, LoadResult, PreparedRequest
from headrace.bench.serve_flags import SAMPLING, BenchSettings, make_parser, settings_of
from headrace_core.errors import HeadraceError


class Unreachable(HeadraceError):
    """The server was not ready in time, or refuses what the benchmark asks."""


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    settings = settings_of(args)
    if args.plot:
        plots.check(args.plot)
    if _keeps(args):
        folder = results.make_folder(args.result_dir, "result_dir")
        if args.result_filename:
            results.check_output(folder / args.result_filename, "result_filename")
    backend = BACKENDS[args.backend]()
    tokenizer = datasets.read_tokenizer(args.tokenizer) if args.tokenizer else None
    plan = datasets.DatasetOptions(
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


async def _drive(
    args: Namespace, backend: Backend, samples: Sequence[SampleRequest], settings: BenchSettings
) -> tuple[LoadResult, str]:
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
            await LoadGenerator(client, backend, settings.endpoint, warm, [0.0] * len(warm),
                       args.max_concurrency).run()  # fmt: skip
        times = send_times(
            len(calls), request_rate=args.request_rate, burstiness=args.burstiness,
            ramp_up=settings.ramp_up, seed=args.seed,
        )  # fmt: skip
        with results.progress(
            len(calls), "requests", "request", enabled=not args.disable_tqdm
        ) as bar:
            load = LoadGenerator(client, backend, settings.endpoint, calls, times, args.max_concurrency,
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
    samples: Sequence[SampleRequest],
    model: str,
    options: Mapping[str, Any],
) -> list[PreparedRequest]:
    models = args.lora_modules or [model]
    calls = []
    for index, sample in enumerate(samples):
        prefix = args.request_id_prefix
        headers = {} if prefix is None else {"X-Request-Id": f"{prefix}{index}"}
        body = backend.body(sample, models[index % len(models)], options)
        calls.append(PreparedRequest(sample, body, headers))
    return calls


def _probe(sample: SampleRequest) -> SampleRequest:
    """A short request of the same kind: the readiness check must leave no measured prompt in a cache."""
    prompt: str | list[int] = "Hello" if isinstance(sample.prompt, str) else sample.prompt[-2:]
    return SampleRequest(prompt, 2, None)


async def _first_model(client: Client, args: Namespace, settings: BenchSettings) -> str:
    path = "/v1/models"

    async def ask() -> HttpResponse:
        return await client.get(path)

    answer = await _answered(ask, settings.base_url + path, args.ready_check_timeout_sec)
    try:
        return str(answer.json()["data"][0]["id"])
    except (HttpError, KeyError, IndexError, TypeError):
        raise Unreachable(f"{settings.base_url}{path}: lists no model; set --model") from None


async def _until_ready(
    client: Client, settings: BenchSettings, backend: Backend, body: bytes, seconds: float
) -> None:
    async def ask() -> HttpResponse:
        return await client.post(settings.endpoint, body)

    answer = await _answered(ask, settings.base_url + settings.endpoint, seconds)
    probe = backend.outcome(answer, SampleRequest("", 1, None), answer.started)
    if probe.error is not None and probe.error != "no token arrived":  # it may have ended at once
        raise Unreachable(f"{settings.base_url}{settings.endpoint}: {probe.error}")


async def _answered(ask: Any, url: str, seconds: float) -> HttpResponse:
    """Ask until an answer that is no 5xx comes.

    Raises:
        Unreachable: none came within ``seconds``, or the server refuses.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            answer: HttpResponse = await ask()
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
    args: Namespace,
    run: LoadResult,
    samples: Sequence[SampleRequest],
    model: str,
    settings: BenchSettings,
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


def _details(run: LoadResult) -> dict[str, Any]:
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


def _shown(args: Namespace, report: Mapping[str, Any], settings: BenchSettings) -> str:
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


def _say_oddities(run: LoadResult) -> None:
    """Print notes that a reader of the figures needs."""
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
            f"note: {tokens} tokens arrived in {chunks} events; throughput and TPOT count tokens, "
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
