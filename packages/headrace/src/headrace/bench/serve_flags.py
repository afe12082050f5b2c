"""Flags of ``headrace bench serve``, and the settings that they make."""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Sequence

from headrace.arguments import Parser, json_object
from headrace.bench import datasets, metrics, plots, results
from headrace.bench.arrivals import RampUp
from headrace.bench.backends import BACKENDS
from headrace_core.errors import ConfigError

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


def make_parser() -> Parser:
    """The parser of ``headrace bench serve``."""
    parser = Parser(
        prog="headrace bench serve",
        description="Send requests to a running OpenAI-compatible server and measure the answers.",
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
                       help="the model's name on the server, if it differs from --model")  # fmt: skip
    group.add_argument("--tokenizer", metavar="FOLDER",
                       help="of the model; prompts are then sent as text, not as token ids")  # fmt: skip
    group.add_argument("--lora-modules", nargs="+", metavar="NAME", default=[],
                       help="adapters of the server; each request uses one of them")  # fmt: skip
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), metavar="KEY",
                       help="(default: $OPENAI_API_KEY)")  # fmt: skip
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME=VALUE", help="repeatable"
    )
    group.add_argument("--insecure", action="store_true", help="accept any TLS certificate")
    group.add_argument("--ready-check-timeout-sec", type=float, default=600.0, metavar="SECONDS",
                       help="longest wait for a ready server; 0: no check (default: 600)")  # fmt: skip
    group.add_argument("--request-timeout", type=float, default=3600.0, metavar="SECONDS",
                       help="a request that takes longer counts as failed (default: 3600)")  # fmt: skip


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Load")
    group.add_argument("--request-rate", type=float, default=float("inf"), metavar="RPS",
                       help="requests a second; inf sends all at once (default: inf)")  # fmt: skip
    group.add_argument("--burstiness", type=float, default=1.0, metavar="SHAPE",
                       help="1: by chance (Poisson); below: in bursts; above: evenly (1)")  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most requests at the same time"
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
    group.add_argument("--label", help="name of this run (default: the backend)")
    group.add_argument("--plot", metavar="FILE", help=plots.HELP)
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


class BenchSettings:
    """Values of the flags, checked and in the types that are used."""

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


def settings_of(args: Namespace) -> BenchSettings:
    """The settings of a parsed command line.

    Raises:
        ConfigError: a flag's value cannot be used; names the flag.
    """
    for flag in ("max_concurrency", "num_prompts"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            name = "--" + flag.replace("_", "-")
            raise ConfigError(f"{name} {value}: must be at least 1", field=flag)
    return BenchSettings(args)


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
