"""``headrace bench startup``: process start to first token, from the disk and from memory.

A start before may have left the checkpoint in the system's memory, its page cache, and on the disk what it
measured, which tensors it packed, and packed weights (ADRs 147, 156, 172): the start before the warm ones,
which is not counted, sees to all."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench import offline_common as offline
from headrace.bench import plots, results
from headrace.engine_args import EngineArgs
from headrace.logs import configure
from headrace_core.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from headrace.arguments import Parser

COLD_STARTS = 3
"""With ``--evict-files``, unless another number is given."""
LONGEST = 1800.0
"""Seconds until a start that gives no token has failed."""

EPILOG = """\
Each start is a new process. Starts differ in what the system has in memory: warm starts find the
checkpoint's files there. Cold starts, which --evict-files adds, read
them from the disk. Libraries stay in memory in both.

Try:
  headrace bench startup                                       # the demo model
  headrace bench startup /path/to/model --plot startup.png     # where the time goes, as a picture
  headrace bench startup /path/to/model --through serve        # until a server's first token
  headrace bench startup /path/to/model --evict-files          # cold starts, too"""

Phases = Mapping[str, float]
"""Phase -> seconds, in order."""


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    configure("WARNING")
    _check(args)
    if args.num_iters_cold is None:
        args.num_iters_cold = COLD_STARTS if args.evict_files else 0
    settings = offline.engine_settings(args)
    counts = {"cold": args.num_iters_cold, "warm": args.num_iters_warm}
    total = sum(counts.values()) + args.num_iters_warmup
    with results.progress(total, "starts", "start", enabled=not args.disable_tqdm) as bar:
        series = {
            "cold": [_cold(args, settings, bar) for _ in range(counts["cold"])],
            "warm": _warm(args, settings, bar),
        }
    report = _report(args, series)
    print(_shown(report, series))
    if args.output_json:
        results.write_json(args.output_json, report)
        results.say(f"results: {args.output_json}")
    if args.plot:
        rows = {kind: medians(starts) for kind, starts in series.items() if starts}
        plots.timelines(rows, args.plot, title=f"Start to first token: {report['model']}")
        results.say(f"picture: {args.plot}")
    return 0


def make_parser() -> Parser:
    """The parser of ``headrace bench startup``."""
    parser = offline.parser("startup", "Time a start, from the process to the first token.", EPILOG)
    parser.add_argument(
        "--num-iters-cold", type=int,
        help=f"starts that read the checkpoint from the disk (default: {COLD_STARTS} with "
        "--evict-files, else 0)",
    )  # fmt: skip
    for flag, default, text in (
        ("num-iters-warmup", 1, "starts before the warm ones, which are not counted"),
        ("num-iters-warm", 3, "starts with the checkpoint in memory"),
    ):
        parser.add_argument(
            f"--{flag}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument("--through", choices=("offline", "serve"), default="offline",
                        help="LLM, with a timeline of its phases, or a server's completion "
                        "(default: offline)")  # fmt: skip
    parser.add_argument("--evict-files", action="store_true",
                        help="also time cold starts: before each, the system drops the "
                        "checkpoint's files, and packed weights that are kept, from its memory")  # fmt: skip
    parser.add_argument("--output-json", metavar="FILE", help="write both series here")
    parser.add_argument("--plot", metavar="FILE", help=plots.HELP)
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return EngineArgs.add_cli_args(parser)


def medians(starts: Sequence[Phases]) -> dict[str, float]:
    """The median of each phase, in the order of the first start."""
    names = dict.fromkeys(name for phases in starts for name in phases)
    return {name: statistics.median(phases.get(name, 0.0) for phases in starts) for name in names}


def _check(args: Namespace) -> None:
    for name in ("num_iters_cold", "num_iters_warmup", "num_iters_warm"):
        if (getattr(args, name) or 0) < 0:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} {getattr(args, name)}: must not be negative", field=name)
    if args.num_iters_cold and not args.evict_files:
        raise ConfigError(
            f"--num-iters-cold {args.num_iters_cold}: needs --evict-files; nothing else of a start is "
            "kept for the next one",
            field="num_iters_cold",
        )
    cold = args.num_iters_cold is None and args.evict_files
    if not (args.num_iters_cold or args.num_iters_warm or cold):
        raise ConfigError(
            "--num-iters-cold 0 and --num-iters-warm 0: nothing to measure", field="num_iters_cold"
        )
    if args.output_json:
        results.check_output(args.output_json, "output_json")
    if args.plot:
        plots.check(args.plot)


def _cold(args: Namespace, settings: Mapping[str, Any], bar: results.Bar) -> Phases:
    _evict(settings.get("model"))
    return _start(args, settings, bar)


def _warm(args: Namespace, settings: Mapping[str, Any], bar: results.Bar) -> list[Phases]:
    if args.num_iters_warm:
        for _ in range(args.num_iters_warmup):
            _start(args, settings, bar)
    return [_start(args, settings, bar) for _ in range(args.num_iters_warm)]


def _start(args: Namespace, settings: Mapping[str, Any], bar: results.Bar) -> Phases:
    once = _offline_start if args.through == "offline" else _serve_start
    phases = once(settings)
    bar.update(1)
    return phases


def _offline_start(settings: Mapping[str, Any]) -> Phases:
    content = json.dumps({"use_tqdm_on_load": False, **settings})
    argv = [sys.executable, "-m", "headrace.bench.first_token", content, repr(time.monotonic())]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONGEST)
    if done.returncode != 0:
        raise EngineError(f"a start failed: {_last_line(done.stderr)}")
    phases: Phases = json.loads(done.stdout)
    return phases


def _serve_start(settings: Mapping[str, Any]) -> Phases:
    """``headrace serve``, polled for its health, then asked for one token."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        config, log = Path(folder) / "flags.yaml", Path(folder) / "log"
        flags = {"port": int(url.rpartition(":")[2]), "host": "127.0.0.1", **settings}
        config.write_text(json.dumps(flags))  # JSON is YAML
        argv = [sys.executable, "-m", "headrace", "serve", "--config", str(config)]
        begin = time.monotonic()
        with log.open("w") as out:
            server = subprocess.Popen(argv, stdout=out, stderr=out)
        try:
            _poll(url + "/health", None, server, log)
            ready = time.monotonic()
            body = {"prompt": [3, 4, 5], "max_tokens": 1, "temperature": 0}
            _poll(url + "/v1/completions", json.dumps(body).encode(), server, log)
            return {"until healthy": ready - begin, "first token": time.monotonic() - ready}
        finally:
            server.terminate()
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _poll(url: str, body: bytes | None, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LONGEST
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while time.monotonic() < deadline:
        if server.poll() is not None:
            said = _last_line(log.read_text(errors="replace"))
            raise EngineError(f"the server ended with status {server.returncode}: {said}")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                response.read()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise EngineError(f"{url}: HTTP {error.code}: {error.read()[:300]!r}") from error
        except OSError:
            pass
        time.sleep(0.005)
    raise EngineError(f"{url}: no answer within {LONGEST:g} s")


def _evict(model: str | None) -> None:
    """Have the system forget the checkpoint's files, and packed weights that are kept
    (``--packed-weights-cache-gb``): the next reading comes from the disk."""
    from headrace import demo
    from headrace.assembly.ahead.packed import kept_files

    folder = Path(model) if model is not None else demo.path()
    if not hasattr(os, "posix_fadvise") or not folder.is_dir():
        raise ConfigError(
            f"--evict-files: needs Linux and a checkpoint in a folder, not {str(folder)!r}",
            field="evict_files",
        )
    for path in (*folder.iterdir(), *kept_files(os.environ)):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _report(args: Namespace, series: Mapping[str, Sequence[Phases]]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "model": args.model or "demo",
        "through": args.through,
        **offline.machine(),
    }
    for kind, starts in series.items():
        totals = [sum(phases.values()) for phases in starts]
        report[f"{kind}_startup_times"] = totals
        report[f"avg_{kind}_startup_time"] = statistics.fmean(totals) if totals else None
        report[f"{kind}_phases"] = list(starts)
    return report


def _shown(report: Mapping[str, Any], series: Mapping[str, Sequence[Phases]]) -> str:
    kinds = [kind for kind, starts in series.items() if starts]
    middle = {kind: medians(series[kind]) for kind in kinds}
    names = dict.fromkeys(name for phases in middle.values() for name in phases)
    rows = [[name, *(f"{middle[kind].get(name, 0.0):.3f}" for kind in kinds)] for name in names]
    totals = [report[f"{kind}_startup_times"] for kind in kinds]
    rows.append(["total, median", *(f"{statistics.median(each):.3f}" for each in totals)])
    rows.append(["total, lowest", *(f"{min(each):.3f}" for each in totals)])
    rows.append(["total, highest", *(f"{max(each):.3f}" for each in totals)])
    title = f"Start to first token, seconds: {report['model']}"
    return f"{title}\n\n{results.grid(['phase', *kinds], rows)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
