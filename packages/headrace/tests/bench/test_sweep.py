"""Sweeps, with small programs in the place of servers and benchmarks."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from headrace.bench import sla, sweep
from headrace_core.errors import ConfigError, EngineError

SERVER = """
import socket, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
open(sys.argv[1], "a").write("start " + " ".join(sys.argv[2:]) + "\\n")
listening = socket.create_server(("127.0.0.1", port))
time.sleep(600)  # until it is ended
"""

BENCH = """
import json, os, sys
words = sys.argv
log, fail_at = words[1], words[2]
count = sum(line.startswith("bench") for line in open(log)) if os.path.exists(log) else 0
open(log, "a").write("bench " + " ".join(words[4:]) + "\\n")
if count == int(fail_at):
    sys.exit("out of luck")
folder = words[words.index("--result-dir") + 1]
name = words[words.index("--result-filename") + 1]
load = float(words[words.index("--max-concurrency") + 1]) if "--max-concurrency" in words else 1
json.dump({"output_throughput": 10 * load, "median_e2el_ms": 5 * load, "median_tpot_ms": load, "failed": 0,
           "p99_ttft_ms": 10 * load, "itls": [1, 2]}, open(os.path.join(folder, name), "w"))
"""


@pytest.fixture
def programs(tmp_path):
    """Command lines of the stand-ins, and the log that both write."""
    log = tmp_path / "log"
    for name, text in (("server.py", SERVER), ("bench.py", BENCH)):
        (tmp_path / name).write_text(text)
    words = [sys.executable, str(tmp_path / "server.py"), str(log)]

    def bench(fail_at: int = -1) -> str:
        return shlex.join(
            [sys.executable, str(tmp_path / "bench.py"), str(log), str(fail_at), "serve"]
        )

    return shlex.join(words), bench, log


def _sweep(programs, folder: Path, *more: str, fail_at: int = -1) -> int:
    serve_command, bench, _ = programs
    return sweep.main(["serve", "--serve-cmd", serve_command, "--bench-cmd", bench(fail_at),
                       "--serve-params", '[{"max-num-seqs": 4}, {"max_num_seqs": 8}]',
                       "--bench-params", '[{"max-concurrency": 1}, {"max-concurrency": 2}]',
                       "--num-runs", "1", "-o", str(folder), *more])  # fmt: skip


def _count(log: Path, word: str) -> int:
    return sum(line.startswith(word) for line in log.read_text().splitlines())


def test_two_by_two(programs, tmp_path, capsys):
    out = tmp_path / "out"
    assert _sweep(programs, out) == 0
    log = programs[2]
    assert (_count(log, "start"), _count(log, "bench")) == (2, 4)
    assert len(list(out.glob("*/*.json"))) == 4
    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["max_num_seqs"], r["max_concurrency"], r["output_throughput"]) for r in rows] == [
        ("4", "1", "10.0"), ("4", "2", "20.0"), ("8", "1", "10.0"), ("8", "2", "20.0"),
    ]  # fmt: skip
    assert "output_throughput" in capsys.readouterr().out


def test_resume_runs_only_what_is_missing(programs, tmp_path):
    out, log = tmp_path / "out", programs[2]
    with pytest.raises(EngineError, match="out of luck"):
        _sweep(programs, out, fail_at=2)  # the third: the second server's first
    assert len(list(out.glob("*/*.json"))) == 2
    with pytest.raises(ConfigError, match="--resume"):
        _sweep(programs, out)
    before = _count(log, "bench"), _count(log, "start")
    assert _sweep(programs, out, "--resume") == 0
    assert (_count(log, "bench") - before[0], _count(log, "start") - before[1]) == (2, 1)
    assert len(list(out.glob("*/*.json"))) == 4


def test_a_dry_run_starts_nothing(programs, tmp_path, capsys):
    assert _sweep(programs, tmp_path / "out", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert not programs[2].exists()
    assert not (tmp_path / "out").exists()
    assert shown.count("--max-num-seqs") == 2
    assert shown.count("--max-concurrency") == 4


def test_a_server_that_ends_is_told(tmp_path):
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit(3)"])
    with pytest.raises(EngineError, match="status 3"):
        sweep.main(
            ["serve", "--serve-cmd", command, "--bench-cmd", "x serve", "-o", str(tmp_path / "o")]
        )


def test_addresses_and_commands():
    url, words = sweep.address_of(["headrace", "serve", "m", "--port", "8123"])
    assert url == "http://127.0.0.1:8123"
    assert words[:3] == [sys.executable, "-m", "headrace"]
    url, words = sweep.address_of(["other"])
    assert words == ["other", "--port", url.rpartition(":")[2]]
    command = sweep.bench_command(
        ["x", "serve", "--port", "1"], {}, "http://127.0.0.1:2", Path("a/b.json")
    )
    assert "--base-url" not in command
    command = sweep.bench_command(
        ["headrace", "bench", "latency"], {"n": 2}, None, Path("a/b.json")
    )
    assert command[3:] == ["bench", "latency", "--n", "2", "--output-json", "a/b.json"]


def test_option_maps_become_flags(tmp_path):
    options = {
        "max_num_seqs": 8,
        "--ignore-eos": True,
        "x": False,
        "y": None,
        "z": [1, 2],
        "j": {"a": 1},
    }
    assert sweep.flags_of(options) == [
        "--max-num-seqs", "8", "--ignore-eos", "--no-x", "--z", "1", "2", "--j", '{"a": 1}',
    ]  # fmt: skip
    file = tmp_path / "maps.json"
    file.write_text('[{"a": 1}]')
    assert sweep.option_maps(str(file)) == [{"a": 1}]
    for wrong in ("[1]", "/no/such", '[{"a": ]'):
        with pytest.raises(ArgumentTypeError):
            sweep.option_maps(wrong)


def test_names_of_different_options_differ():
    names = {sweep.name_of(o, "none") for o in ({}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1})}
    assert len(names) == 5
    assert sweep.name_of({"path": "/x y"}, "none") == "path=_x_y"


@pytest.mark.parametrize("best", [1.0, 5.0, 11.0, 64.0])
def test_search_finds_the_highest_load(best):
    tried = []

    def kept(load: float) -> bool:
        tried.append(load)
        return load <= best

    assert sla.search(kept, 1.0, 64.0, 0.1, whole=True) == best
    assert all(load == int(load) for load in tried)
    found = sla.search(lambda load: load <= best, 1.0, 64.0, 0.05, whole=False)
    assert found == pytest.approx(best, rel=0.06)


def test_search_without_a_load_that_keeps_the_limits():
    assert sla.search(lambda _: False, 1.0, 64.0, 0.1, whole=True) is None


def test_sla_measures_until_it_knows(programs, tmp_path, capsys):
    status = sla.main(["--serve-cmd", programs[0], "--bench-cmd", programs[1](), "--variable",
                       "max-concurrency", "--low", "1", "--high", "16", "--keep", "p99_ttft_ms<=65",
                       "-o", str(tmp_path / "out")])  # fmt: skip
    assert status == 0
    assert json.loads((tmp_path / "out" / "sla.json").read_text())["highest"] == 6
    assert "keeps all limits: 6" in capsys.readouterr().out


def test_pictures_of_a_sweep(programs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    _sweep(programs, out, "--plot", str(tmp_path / "a.png"))
    assert sweep.main(["plot_pareto", "-o", str(out), "--group", "max_num_seqs", "--plot",
                       str(tmp_path / "b.html"), "--filter", "max_num_seqs=4"]) == 0  # fmt: skip
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "b.html").read_text()
    assert "<svg" in page
    assert "Pareto front" in page
    with pytest.raises(ConfigError, match="no result"):
        sweep.main(["plot", "-o", str(out), "--filter", "max_num_seqs=5", "--plot", "x.png"])
