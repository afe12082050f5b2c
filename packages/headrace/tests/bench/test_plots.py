from __future__ import annotations

import importlib.util

import pytest

from headrace.bench import plots, results
from headrace.bench.metrics import Outcome
from headrace.bench.plots import PlotPoint
from headrace_core.errors import ConfigError, MissingDependency

OUTCOMES = [
    Outcome(0.1 * i, num_output_tokens=3, ttft=0.05, e2el=0.09, itls=[0.02, 0.02]) for i in range(8)
]
REPORT = {"model_id": "m", "backend": "openai", "request_rate": 4.0, "output_throughput": 12.5}


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"headrace\[bench\]"):
        plots.check("x.png")


def test_a_suffix_that_means_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"\.png, \.svg, \.pdf, \.html"):
        plots.check("x.jpeg")


@pytest.mark.parametrize(
    ("suffix", "begin"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("html", b"<!doctype")]
)
def test_pictures_of_a_run(tmp_path, suffix, begin):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{suffix}"
    plots.serving(OUTCOMES, REPORT, str(path))
    content = path.read_bytes()
    assert content.startswith(begin)
    if suffix == "html":
        assert b"12.5" in content
        assert b"Time to first token" in content


def test_a_run_that_measured_nothing_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plots.serving([], REPORT, str(tmp_path / "empty.svg"))
    plots.timelines(
        {"cold": {"a": 1.0, "b": 2.0}, "warm": {"b": 1.0}}, str(tmp_path / "t.svg"), title="t"
    )
    assert (
        b"3.00 s" in (tmp_path / "t.svg").read_bytes() or (tmp_path / "t.svg").stat().st_size > 1000
    )


def test_the_pareto_front_has_no_beaten_point():
    points = [
        PlotPoint("a", 1, 10),
        PlotPoint("b", 2, 8),
        PlotPoint("c", 1.5, 7),
        PlotPoint("d", 3, 1),
        PlotPoint("e", 3, 0.5),
    ]
    assert [p.label for p in plots.pareto(points)] == ["a", "b", "d"]


def test_tokens_over_time_add_up():
    times, rates = plots.token_rate(OUTCOMES, num_bins=10)
    assert sum(rates) * 2 * times[0] == pytest.approx(24)


def test_tables():
    text = results.table("Run", [("Requests", "20"), "Part", ("Tokens/s", "1.5")])
    assert {len(line) for line in text.splitlines()} == {results.WIDTH}
    grid = results.grid(["what", "n"], [["a", "1"], ["long name", "10"]]).splitlines()
    assert grid[2:] == ["a           1", "long name  10"]
    assert results.sparkline([1, 1, 5], width=3) == "█ ▄"
