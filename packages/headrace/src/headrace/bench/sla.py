"""``headrace bench sweep sla``: the highest load at which limits are still kept."""

from __future__ import annotations

import json
import operator
import re
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from headrace.arguments import Parser
from headrace.bench import results
from headrace.bench.sweep import address_of, bench_command, call, running
from headrace_core.errors import ConfigError

COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}
WHOLE = ("max-concurrency",)
"""Variables that take whole numbers."""

EPILOG = """\
Try:
  headrace bench sweep sla --serve-cmd 'headrace serve' \\
    --bench-cmd 'headrace bench serve --num-prompts 64 --random-input-len 64 --ignore-eos' \\
    --variable request-rate --low 1 --high 64 --keep 'p99_ttft_ms<=500' 'median_tpot_ms<=50'"""


class SlaLimit(NamedTuple):
    """A figure of ``bench serve`` and what it must keep to."""

    key: str
    comparison: str
    value: float

    def kept(self, figures: Mapping[str, Any]) -> bool:
        """True if a result meets the limit.

        Raises:
            ConfigError: the result has no such figure.
        """
        if not isinstance(figures.get(self.key), (int, float)):
            raise ConfigError(f"--keep {self.key}: the results have no such figure", field="keep")
        return COMPARISONS[self.comparison](figures[self.key], self.value)


def limit(text: str) -> SlaLimit:
    """``p99_ttft_ms<=500``.

    Raises:
        ArgumentTypeError: it has another form.
    """
    match = re.fullmatch(r"(\w+)(<=|>=)([0-9.]+)", text.replace(" ", ""))
    if match is None:
        raise ArgumentTypeError(f"{text!r}: must be FIGURE<=NUMBER or FIGURE>=NUMBER")
    return SlaLimit(match[1], match[2], float(match[3]))


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if not 0 < args.low <= args.high:
        raise ConfigError(
            f"--low {args.low:g}, --high {args.high:g}: must be above 0 and ascending", field="low"
        )
    folder = results.make_folder(args.output_dir, "output_dir")
    url, server = None, None
    if args.serve_cmd is not None:
        url, command = address_of(shlex.split(args.serve_cmd))
        server = running(command, url, folder / "server.log", args.server_timeout)
    tried: list[dict[str, Any]] = []
    with server or nullcontext():
        best = search(
            lambda load: _kept(args, load, url, folder, tried),
            args.low, args.high, args.tolerance, whole=args.variable in WHOLE,
        )  # fmt: skip
    rows = [[f"{t['load']:g}", "yes" if t["kept"] else "no",
             *(f"{t[each.key]:.4g}" for each in args.keep)] for t in tried]  # fmt: skip
    print(results.grid([args.variable, "kept", *(each.key for each in args.keep)], rows))
    print(
        f"\nhighest {args.variable} that keeps all limits: {'none' if best is None else f'{best:g}'}"
    )
    results.write_json(
        folder / "sla.json", {"variable": args.variable, "highest": best, "tried": tried}
    )
    return 0 if best is not None else 1


def search(
    kept: Callable[[float], bool], low: float, high: float, tolerance: float, *, whole: bool
) -> float | None:
    """The highest load between ``low`` and ``high`` that is kept, by halving; None if even ``low`` is not.

    Args:
        kept: whether a load keeps the limits; taken to be true below some load and false above.
        tolerance: stop when the answer is known to this share of itself.
        whole: only whole numbers.
    """
    if not kept(low):
        return None
    if high == low or kept(high):
        return high
    while (high - low > 1) if whole else (high - low > tolerance * low):
        middle = float(round((low + high) / 2)) if whole else (low + high) / 2
        if kept(middle):
            low = middle
        else:
            high = middle
    return low


def _kept(
    args: Namespace, load: float, url: str | None, folder: Path, tried: list[dict[str, Any]]
) -> bool:
    path = folder / f"{args.variable}={load:g}.json"
    value = int(load) if args.variable in WHOLE else load
    call(bench_command(shlex.split(args.bench_cmd), {args.variable: value}, url, path))
    figures = json.loads(path.read_text())
    answer = figures["failed"] == 0 and all(each.kept(figures) for each in args.keep)
    tried.append(
        {"load": load, "kept": answer, **{each.key: figures[each.key] for each in args.keep}}
    )
    results.say(f"{args.variable} {load:g}: {'kept' if answer else 'not kept'}")
    return answer


def _parser() -> Parser:
    parser = Parser(
        prog="headrace bench sweep sla",
        description="Find the highest load at which a server keeps given limits.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--bench-cmd", required=True, metavar="COMMAND", help="headrace bench serve ...")
    add("--keep", nargs="+", type=limit, required=True, metavar="LIMIT", help="as p99_ttft_ms<=500")
    add("--variable", choices=("request-rate", "max-concurrency"), default="request-rate",
        help="the varied flag (default: request-rate)")  # fmt: skip
    add("--low", type=float, default=1.0, help="(default: 1)")
    add("--high", type=float, default=64.0, help="(default: 64)")
    add(
        "--tolerance", type=float, default=0.1, metavar="SHARE", help="of the answer (default: 0.1)"
    )
    add("--serve-cmd", metavar="COMMAND", help="start this server; without it, one is running")
    add("--server-timeout", type=float, default=600.0, metavar="SECONDS", help="(default: 600)")
    add("-o", "--output-dir", default="results", metavar="FOLDER", help="(default: results)")
    return parser
