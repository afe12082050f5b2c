"""``headrace plan``: which layout a model should have on given devices."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.arguments import Parser, argv_of
from headrace.engine_args import EngineArgs
from headrace_core.errors import CapacityError, ConfigError

if TYPE_CHECKING:
    from headrace.planning.advice import Advice
    from headrace.planning.devices import Devices
    from headrace.planning.plan import LayoutPlan, Planner

EPILOG = """\
examples:
  headrace plan ./Qwen3-8B --devices cpu                      # this machine: a rank for each NUMA node
  headrace plan ./Qwen3-8B --devices 2x64GiB@100GB/s --link 20GB/s
  headrace plan ./Qwen3-8B --devices 4x80GiB@3TB/s --link 400GB/s --link-latency 10us --concurrency 64
  headrace plan ./Qwen3-8B --devices 24GiB@60GB/s --quantization int8 --context 8k
  headrace plan ./Qwen3-8B --devices 4x64GiB@100GB/s -tp 2    # only layouts with two ranks to a layer
  headrace plan ./Qwen3-8B --devices 2xcpu --json | jq .advice

how to read it:
  A row is a layout: tp N divides each layer over N ranks, pp N puts layers on N stages, dp N starts N
  engines, ep spreads whole experts. Its bytes are those of one rank, exact for weights and cache; a step's
  time and tokens/s are bounds from bandwidths alone, by which layouts compare. "runs: no" has its reason
  below the table: bytes that are missing, or the engine's own refusal.

Reads config.json and no weights; a folder without weight files will do. If nothing fits, the last line says
what is missing and what was tried and would fit, and the exit status is that of HR-MEM-001.
"""
_OF_LAYOUT = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_model_len",
    "max_num_seqs", "kv_cache_memory_bytes", "model",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    devices = _devices(args)  # before torch is imported, which takes longer than reading a typo
    from headrace.planning.advice import advise
    from headrace.planning.plan import Planner
    from headrace.planning.report import report

    engine_args = EngineArgs.from_cli_args(args)
    settings = dict(engine_args.settings)
    _check_twice(args, settings)
    if args.context is not None:
        settings["max_model_len"] = args.context
    config = EngineArgs(**settings).create_engine_config()
    planner = Planner(config, args.concurrency)
    plans = planner.layouts(devices)
    advice = advise(planner, plans, devices, config)
    command = "" if advice.chosen is None else _command(engine_args, planner, advice)
    if args.json:
        facts = {
            "model": planner.resolved.info.name,
            "dtype": planner.resolved.info.dtype,
            "devices": devices.facts(),
            "workload": planner.workload._asdict(),
            "layouts": [plan.facts() for plan in plans],
            "advice": {**advice.facts(), "command": command or None},
        }
        print(json.dumps(facts, indent=2))
    else:
        print(report(planner, plans, devices, advice, command))
    if advice.chosen is None:
        raise CapacityError(_refusal(planner, plans, devices, advice))
    return 0


def _check_twice(args: Namespace, settings: Mapping[str, object]) -> None:
    """Raises: ConfigError: flags say the same thing twice, or one needs another."""
    if "max_num_seqs" in settings:
        raise ConfigError(
            f"max_num_seqs = {settings['max_num_seqs']}: must be left out: --concurrency is of all engines "
            "together",
            field="max_num_seqs",
        )
    if args.context is not None and "max_model_len" in settings:
        raise ConfigError(
            f"context = {args.context}: must be left out with --max-model-len, which is the same",
            field="context",
        )
    if args.link_latency is not None and args.link is None:
        raise ConfigError(
            f"link_latency = {args.link_latency!r}: needs --link", field="link_latency"
        )


def _parser() -> Parser:
    parser = Parser(
        prog="headrace plan",
        description="Compare the ways in which a model can be spread over devices (ranks, stages, engines): "
        "memory of each rank, bytes that ranks exchange, a bound of the speed; and recommend one. Starts no "
        "engine and reads no weights.",
        epilog=EPILOG,
    )
    parser.add_model("folder, GGUF file or hub name")
    parser.add_argument(
        "--devices", required=True, metavar="NxSIZE@SPEED",
        help="devices with their free memory and the speed of reading it, as 2x64GiB@100GB/s; cpu: this "
        "machine, a device for each NUMA node, measured; 2xcpu: two equal parts of it",
    )  # fmt: skip
    parser.add_argument(
        "--link", metavar="SPEED",
        help="speed of exchanges between devices, as 20GB/s (default: their time is left out)",
    )  # fmt: skip
    parser.add_argument(
        "--link-latency", metavar="TIME", help="of each exchange, as 5us (default: 0; needs --link)"
    )
    parser.add_argument(
        "--context", type=_count, metavar="TOKENS",
        help="of each request, prompt and answer (default: --max-model-len, or what the model can)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=_count, default=8, metavar="N",
        help="requests at once, over all engines (default: 8)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    EngineArgs.add_cli_args(parser)
    return parser


def _count(text: str) -> int:
    from headrace.arguments import human_int

    return human_int(text)


def _devices(args: Namespace) -> Devices:
    from headrace.planning.devices import parse_devices, parse_speed, parse_time
    from headrace_core.platform import CpuPlatform

    devices = parse_devices(args.devices, CpuPlatform().available_memory())
    if args.link is not None:
        devices = devices._replace(link=parse_speed(args.link, "link"))
    if args.link_latency is not None:
        devices = devices._replace(latency=parse_time(args.link_latency, "link_latency"))
    return devices


def _command(engine_args: EngineArgs, planner: Planner, advice: Advice) -> str:
    """The command line that starts the recommended layout."""
    assert advice.chosen is not None
    layout, (context, concurrency) = advice.chosen.layout, planner.workload
    others = {n: v for n, v in engine_args.settings.items() if n not in _OF_LAYOUT}
    cache = engine_args.settings.get("kv_cache_memory_bytes") or advice.chosen.cache_flag
    limits = {
        "max_model_len": context,
        "max_num_seqs": -(-concurrency // layout.data),
        "kv_cache_memory_bytes": cache or None,
    }
    model = str(engine_args.settings.get("model") or "")
    words = ["headrace", "serve", *([model] if model else []), *layout.flags().split()]
    return shlex.join([*words, *argv_of({**limits, **others})])


def _refusal(
    planner: Planner, plans: Sequence[LayoutPlan], devices: Devices, advice: Advice
) -> str:
    from headrace.planning.advice import failure_of, name_of, nearest
    from headrace.planning.report import describe

    closest = nearest(plans)
    best = ", the nearest" if len(plans) > 1 else ""
    remedies = ", or ".join(advice.remedies)
    return (
        f"model {planner.resolved.info.name!r} does not fit {describe(devices)}: "
        f"{name_of(closest)}{best}: {failure_of(closest)}. "
        + (f"Use {remedies}" if remedies else "Nothing that was tried fits")
    )
