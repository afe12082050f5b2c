from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.cli import bench
from headrace.cli import main as command


def test_help_lists_the_benchmarks(capsys):
    assert bench.main([]) == 0
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in ("latency", "throughput", "serve", "startup", "scaling", "sweep")
    )


@pytest.mark.parametrize(
    "words",
    [
        ["serve"],
        ["latency"],
        ["throughput"],
        ["startup"],
        ["scaling"],
        ["sweep"],
        ["sweep", "serve"],
        ["sweep", "sla"],
    ],
)
def test_every_benchmark_has_help_without_torch_or_matplotlib(words):
    code = (
        "import sys\nfrom headrace.cli.main import run\n"
        f"try:\n    run('bench', {[*words, '--help']!r})\nexcept SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_unknown_benchmarks_are_usage_errors(capsys):
    assert bench.main(["serv"]) == 2
    assert "'serve'" in capsys.readouterr().err
    assert command.run("bench", ["sweep", "serv"]) == 2
    assert "plot_pareto" in capsys.readouterr().err
