"""``headrace bench sweep``: benchmarks over a grid of settings, with resume, tables and pictures."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from headrace.arguments import Parser
from headrace.bench import plots, results
from headrace.disk import naming
from headrace_core.errors import ConfigError, EngineError

Options = Mapping[str, Any]
"""Flag (without dashes) -> value."""

KINDS = {
    "serve": "A server with each of --serve-params, measured with each of --bench-params.",
    "offline": "headrace bench latency, throughput or startup with each of --bench-params.",
    "sla": "The highest load at which a server still keeps given limits.",
    "plot": "A curve from a sweep's results: throughput against latency, say.",
    "plot_pareto": "Tokens/s of each user against tokens/s of the server.",
}

USAGE = """\
usage: headrace bench sweep <kind> [flags]     (headrace bench sweep <kind> --help for its flags)

{kinds}

Try:
  headrace bench sweep serve --serve-cmd 'headrace serve' \\
    --serve-params '[{{"max-num-seqs": 4}}, {{"max-num-seqs": 32}}]' \\
    --bench-cmd 'headrace bench serve --num-prompts 64 --random-input-len 64 --ignore-eos' \\
    --bench-params '[{{"max-concurrency": 1}}, {{"max-concurrency": 8}}, {{"max-concurrency": 32}}]' \\
    --num-runs 1 -o results --plot curve.png
  headrace bench sweep offline --bench-cmd 'headrace bench latency --num-iters 5' \\
    --bench-params '[{{"batch-size": 1}}, {{"batch-size": 8}}]' -o batches
  headrace bench sweep plot -o results --x median_ttft_ms --plot curve.html"""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, KINDS))
        print(USAGE.format(kinds="\n".join(f"  {k:<{width}}  {t}" for k, t in KINDS.items())))
        return 0
    kind, *rest = argv
    if kind not in KINDS:
        raise ConfigError(f"sweep {kind!r}: must be one of {', '.join(KINDS)}", field="sweep")
    commands = {"serve": _grid, "offline": _grid, "plot": _plot, "plot_pareto": _plot}
    if kind == "sla":
        status: int = importlib.import_module("headrace.bench.sla").main(rest)
        return status
    return commands[kind](kind, rest)


@dataclass(frozen=True)
class SweepRun:
    """One run of one combination."""

    serve: Options
    bench: Options
    number: int

    def file(self, folder: Path) -> Path:
        """Where its result is kept: the name tells the settings."""
        return (
            folder
            / name_of(self.serve, "server")
            / f"{name_of(self.bench, 'bench')}-run{self.number}.json"
        )


def make_parser(kind: str) -> Parser:
    """The parser of ``headrace bench sweep serve`` or ``offline``."""
    parser = Parser(prog=f"headrace bench sweep {kind}", description=KINDS[kind])
    add = parser.add_argument
    if kind == "serve":
        add(
            "--serve-cmd",
            required=True,
            metavar="COMMAND",
            help="starts a server; a free --port is added",
        )
        add("--serve-params", type=option_maps, default=[{}], metavar="JSON",
            help="list of flag maps, or a file of it; the server is started once for each")  # fmt: skip
        add(
            "--after-bench-cmd",
            metavar="COMMAND",
            help="run after each measurement; {url} is the server's",
        )
        add("--server-timeout", type=float, default=600.0, metavar="SECONDS",
            help="a server that listens later has failed (default: 600)")  # fmt: skip
    add(
        "--bench-cmd",
        required=True,
        metavar="COMMAND",
        help="headrace bench ...; where results go is added",
    )
    add("--bench-params", type=option_maps, default=[{}], metavar="JSON",
        help="list of flag maps, or a file of it; measured for each")  # fmt: skip
    add("-o", "--output-dir", default="results", metavar="FOLDER", help="(default: results)")
    add("--num-runs", type=int, default=3, help="of each combination (default: 3)")
    add(
        "--resume",
        action="store_true",
        help="run only the points that the folder does not have yet",
    )
    add("--dry-run", action="store_true", help="print the commands, start nothing")
    add("--show-stdout", action="store_true", help="show the output of servers and benchmarks")
    add("--x", help="for --plot: key of the horizontal axis (default: by kind)")
    add("--y", help="for --plot: key of the vertical axis (default: by kind)")
    add("--plot", metavar="FILE", help=plots.HELP)
    return parser


def option_maps(text: str) -> list[Options]:
    """A JSON list of objects, or the name of a file with one.

    Raises:
        ArgumentTypeError: it is neither.
    """
    try:
        content = json.loads(
            Path(text).read_text("utf-8-sig") if not text.lstrip().startswith("[") else text
        )
    except (OSError, ValueError) as error:
        raise ArgumentTypeError(
            f"{text!r}: neither a JSON list nor a file with one ({error})"
        ) from None
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise ArgumentTypeError(f'{text!r}: must be a list of objects, as [{{"max-num-seqs": 8}}]')
    return content or [{}]


def flags_of(options: Options) -> list[str]:
    """Command-line words: True is the bare flag, False its ``--no-`` form, None leaves it out.

    >>> flags_of({"max_num_seqs": 8, "ignore-eos": True})
    ['--max-num-seqs', '8', '--ignore-eos']
    """
    argv: list[str] = []
    for name, value in options.items():
        flag = "--" + name.lstrip("-").replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is False:
            argv.append("--no-" + flag[2:])
        elif isinstance(value, list):
            argv += [flag, *map(str, value)]
        elif isinstance(value, dict):
            argv += [flag, json.dumps(value)]
        elif value is not None:
            argv += [flag, str(value)]
    return argv


def name_of(options: Options, empty: str) -> str:
    """A file name that tells the options; ``empty`` if there are none."""
    parts = [
        f"{name.lstrip('-').replace('_', '-')}={value}" for name, value in sorted(options.items())
    ]
    return re.sub(r"[^\w.=,+-]+", "_", ",".join(parts))[:180] or empty


def _grid(kind: str, argv: Sequence[str]) -> int:
    args = make_parser(kind).parse_args(argv)
    _check(args)
    folder = Path(args.output_dir)
    if not args.dry_run:
        results.make_folder(folder, "output_dir")
    serve_params = args.serve_params if kind == "serve" else [{}]
    numbers = range(args.num_runs)
    cells = [SweepRun(s, b, n) for s, b, n in product(serve_params, args.bench_params, numbers)]
    missing = [cell for cell in cells if not cell.file(folder).exists()]
    if len(missing) < len(cells) and not args.resume:
        raise ConfigError(
            f"{str(folder)!r} has {len(cells) - len(missing)} of these results already; --resume runs the "
            "others, another --output-dir all",
            field="output_dir",
        )
    with results.progress(len(missing), "runs", "run", enabled=not args.dry_run) as bar:
        for serve in serve_params:
            of_server = [cell for cell in missing if cell.serve is serve]
            if of_server:
                _run_cells(kind, args, of_server, folder, bar)
    if args.dry_run:
        return 0
    rows = _summary(cells, folder)
    _show(rows, kind)
    if args.plot:
        x, y = axes_of(rows, args.x, args.y)
        _draw(rows, args.plot, x=x, y=y, label=None, group=None)
    return 0


def _check(args: Namespace) -> None:
    if args.num_runs < 1:
        raise ConfigError(f"--num-runs {args.num_runs}: must be at least 1", field="num_runs")
    if args.plot:
        plots.check(args.plot)


def _run_cells(
    kind: str, args: Namespace, cells: Sequence[SweepRun], folder: Path, bar: results.Bar
) -> None:
    """Everything that one server (or none) is measured with."""
    url, command = None, None
    if kind == "serve":
        command = shlex.split(args.serve_cmd) + flags_of(cells[0].serve)
        url, command = address_of(command)
    if args.dry_run:
        if command is not None:
            print(shlex.join(command))
        for cell in cells:
            print("  " + shlex.join(_bench_words(args, cell, url, cell.file(folder))))
        return
    log = folder / f"{name_of(cells[0].serve, 'server')}.log"
    server = (
        nullcontext()
        if command is None or url is None
        else running(command, url, log, args.server_timeout, show=args.show_stdout)
    )
    with server:
        for cell in cells:
            path = cell.file(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Under another name until it is whole: what an interruption leaves behind is no result.
            part = path.with_suffix(".part")
            call(_bench_words(args, cell, url, part), show=args.show_stdout)
            os.replace(part, path)
            if kind == "serve" and args.after_bench_cmd:
                call(shlex.split(args.after_bench_cmd.format(url=url)), show=args.show_stdout)
            bar.update(1)


def _bench_words(args: Namespace, cell: SweepRun, url: str | None, path: Path) -> list[str]:
    return bench_command(shlex.split(args.bench_cmd), cell.bench, url, path)


def bench_command(argv: Sequence[str], options: Options, url: str | None, path: Path) -> list[str]:
    """A benchmark's command with its options, the server's address, and where its result goes."""
    command = [*own(argv), *flags_of(options)]
    if "serve" not in argv:
        return [*command, "--output-json", str(path)]
    if url is not None and not {"--base-url", "--port", "--host"} & set(argv):
        command += ["--base-url", url]
    return [
        *command,
        "--save-result",
        "--result-dir",
        str(path.parent),
        "--result-filename",
        path.name,
    ]


def own(argv: Sequence[str]) -> list[str]:
    """``headrace ...`` runs in this environment, also where its program is not on the path."""
    if argv and argv[0] == "headrace":
        return [sys.executable, "-m", "headrace", *argv[1:]]
    return list(argv)


def address_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """Where a server will listen, and its command; a free port is added if it names none."""
    argv = own(command)
    for index, word in enumerate(argv):
        if word == "--port" and index + 1 < len(argv):
            return f"http://127.0.0.1:{argv[index + 1]}", argv
        if word.startswith("--port="):
            return f"http://127.0.0.1:{word.partition('=')[2]}", argv
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return f"http://127.0.0.1:{port}", [*argv, "--port", port]


@contextmanager
def running(
    command: Sequence[str], url: str, log: Path, seconds: float, *, show: bool = False
) -> Iterator[None]:
    """A server while the block runs.

    Raises:
        EngineError: it ended, or does not listen within ``seconds``; with the last line that it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        out = None if show else file
        server = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        _wait(server, url, log, seconds)
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path, seconds: float) -> None:
    host, _, port = url.rpartition("/")[2].partition(":")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise EngineError(f"the server ended with status {server.returncode}; see {str(log)!r}")
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise EngineError(f"the server does not listen after {seconds:g} s; see {str(log)!r}")


def call(command: Sequence[str], *, show: bool = False) -> None:
    """Run a benchmark.

    Raises:
        EngineError: it failed; with the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as said:
        out = None if show else said
        status = subprocess.run(command, stdout=out, stderr=out).returncode
        if status != 0:
            said.seek(0)
            lines = said.read().strip().splitlines()[-3:]
            raise EngineError(
                f"{shlex.join(command)!r} ended with status {status}: {' | '.join(lines)}"
            )


def _summary(cells: Sequence[SweepRun], folder: Path) -> list[dict[str, Any]]:
    """One row a result, options and figures side by side; also written as ``summary.csv``."""
    rows = []
    for cell in cells:
        figures = json.loads(cell.file(folder).read_text())
        plain = {k: v for k, v in figures.items() if isinstance(v, (int, float, str)) or v is None}
        options = {name.lstrip("-").replace("-", "_"): value
                   for name, value in {**cell.serve, **cell.bench}.items()}  # fmt: skip
        rows.append({**plain, **options, "run": cell.number, "swept": sorted(options)})
    results.write_json(folder / "summary.json", rows)
    names = dict.fromkeys(name for row in rows for name in row if name != "swept")
    path = folder / "summary.csv"
    with naming(path), path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names), extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    results.say(f"summary: {folder / 'summary.csv'}")
    return rows


SHOWN = (
    "output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms",
    "avg_latency", "tokens_per_second", "output_tokens_per_second", "avg_cold_startup_time",
    "avg_warm_startup_time",
)  # fmt: skip
"""Figures of the table in the terminal, as far as the results have them."""


def _show(rows: Sequence[Mapping[str, Any]], kind: str) -> None:
    swept = list(dict.fromkeys(name for row in rows for name in row["swept"]))
    figures = [name for name in SHOWN if name in rows[0]]
    lines = [[*(str(row.get(name, "")) for name in swept), str(row["run"]),
              *(_number(row.get(name)) for name in figures)] for row in rows]  # fmt: skip
    print(results.grid([*swept, "run", *figures], lines))


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def _plot(kind: str, argv: Sequence[str]) -> int:
    parser = Parser(prog=f"headrace bench sweep {kind}", description=KINDS[kind])
    add = parser.add_argument
    add(
        "-o",
        "--output-dir",
        default="results",
        metavar="FOLDER",
        help="of the sweep (default: results)",
    )
    if kind == "plot":
        add("--x", help="key of the horizontal axis (default: from the sweep)")
        add("--y", help="key of the vertical axis (default: from the sweep)")
    add("--label", metavar="KEY", help="key of the label of each point (default: the varied key)")
    add(
        "--group",
        metavar="KEY",
        help="a line for each of its values (default: the server's settings)",
    )
    add("--filter", nargs="+", default=[], metavar="KEY=VALUE", help="only rows with these")
    add("--plot", default=f"{kind}.png", metavar="FILE", help=plots.HELP)
    args = parser.parse_args(argv)
    plots.check(args.plot)
    rows = _filtered(_read_summary(Path(args.output_dir)), results.pairs(args.filter, "--filter"))
    if kind == "plot_pareto":
        for row in rows:
            tpot = row.get("median_tpot_ms")
            row["user_tokens_per_s"] = 1e3 / tpot if tpot else None
        _draw(rows, args.plot, x="user_tokens_per_s", y="output_throughput", label=args.label,
              group=args.group, frontier=True)  # fmt: skip
    else:
        x, y = axes_of(rows, args.x, args.y)
        _draw(rows, args.plot, x=x, y=y, label=args.label, group=args.group)
    return 0


def _read_summary(folder: Path) -> list[dict[str, Any]]:
    path = folder / "summary.json"
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is not there: no sweep has finished in that folder",
                          field="output_dir")  # fmt: skip
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def _filtered(rows: Sequence[dict[str, Any]], wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    found = [row for row in rows if all(str(row.get(k)) == v for k, v in wanted.items())]
    if not found:
        raise ConfigError(f"--filter {dict(wanted)!r}: no result has these", field="filter")
    return found


def axes_of(rows: Sequence[Mapping[str, Any]], x: str | None, y: str | None) -> tuple[str, str]:
    """Keys of the axes: those given, else latency against throughput, else the first swept setting."""
    if "output_throughput" in rows[0]:
        return x or "median_e2el_ms", y or "output_throughput"
    swept = rows[0]["swept"]
    figure = next((name for name in SHOWN if name in rows[0]), "avg_latency")
    return x or (swept[0] if swept else "run"), y or figure


def _draw(
    rows: Sequence[Mapping[str, Any]], path: str, *, x: str, y: str, label: str | None, group: str | None,
    frontier: bool = False,
) -> None:  # fmt: skip
    """Medians over the runs of each combination, one line a group."""
    series: dict[str, list[plots.PlotPoint]] = {}
    for combination in _combinations(rows):
        xs, ys = ([row[key] for row in combination if isinstance(row.get(key), (int, float))]
                  for key in (x, y))  # fmt: skip
        if not xs or not ys:
            raise ConfigError(f"the results have no figures {x!r} and {y!r}", field="x")
        first = combination[0]
        names = [n for n in first["swept"] if n != group] if label is None else [label]
        text = ", ".join(f"{n.replace('_', ' ')} {first.get(n)}" for n in names)
        line = "" if group is None else f"{group.replace('_', ' ')} {first.get(group)}"
        series.setdefault(line, []).append(plots.PlotPoint(text, _median(xs), _median(ys)))
    for points in series.values():
        points.sort(key=lambda point: point.x)
    model = (
        str(rows[0].get("model_id") or rows[0].get("model") or "").rstrip("/").rpartition("/")[2]
    )
    plots.curves(series, path, title=_title(model, x, y), x=x, y=y, frontier=frontier)
    results.say(f"picture: {path}")


def _title(model: str, x: str, y: str) -> str:
    shown = [plots.AXES.get(key, key).partition(" (")[0].partition(",")[0] for key in (y, x)]
    return ": ".join([*([model] if model else []), " against ".join(shown)])


def _combinations(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each combination of swept settings."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(repr([(n, row.get(n)) for n in row["swept"]]), []).append(row)
    return list(found.values())


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = (len(ordered) - 1) / 2
    return (ordered[math.floor(middle)] + ordered[math.ceil(middle)]) / 2
