"""Files that a benchmark writes at its end are tried before it measures anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.bench import latency, results, serve, sla, startup, sweep, throughput
from headrace_core.errors import ConfigError

NO_MODEL = "/no/such/model"
"""A benchmark that came to its work would fail of it, with another error."""
UNWRITABLE = [
    ("absent/out.json", "its folder does not exist"),
    (".", "is a folder"),
    ("/proc/out.json", "cannot be written"),
]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("place", "said"), UNWRITABLE)
@pytest.mark.parametrize("benchmark", [latency, throughput, startup])
def test_output_json(benchmark: Any, place: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"output_json = '{place}': {said}"):
        benchmark.main([NO_MODEL, "--output-json", place])


@pytest.mark.parametrize(("place", "said"), UNWRITABLE)
@pytest.mark.parametrize(
    ("benchmark", "words"),
    [(latency, [NO_MODEL]), (startup, [NO_MODEL]), (serve, ["--base-url", "http://127.0.0.1:9"])],
)
def test_plot(benchmark: Any, words: list[str], place: str, said: str) -> None:
    pytest.importorskip("matplotlib")
    place = place.replace(".json", ".svg")
    if place == ".":
        Path("folder.svg").mkdir()
        place = "folder.svg"
    with pytest.raises(ConfigError, match=f"plot = '{place}': {said}"):
        benchmark.main([*words, "--plot", place])


@pytest.mark.parametrize(
    "words",
    [["--result-dir", "/proc/x"], ["--result-filename", "/proc/x"], ["--result-filename", "a/b"],
     ["--result-dir", "file"]],
)  # fmt: skip
@pytest.mark.parametrize("keeping", ["--save-result", "--save-detailed", "--append-result"])
def test_results_of_serve(words: list[str], keeping: str) -> None:
    Path("file").touch()
    with pytest.raises(ConfigError, match=r"result_(dir|filename) = "):
        serve.main(["--base-url", "http://127.0.0.1:9", keeping, *words])


def test_folder_of_a_sweep() -> None:
    with pytest.raises(ConfigError, match="output_dir = '/proc/x': cannot be written into"):
        sweep.main(["offline", "--bench-cmd", "headrace bench latency", "-o", "/proc/x"])
    with pytest.raises(ConfigError, match="output_dir = '/proc/x': cannot be written into"):
        sla.main(["--bench-cmd", "headrace bench serve", "--variable", "request-rate", "--low", "1",
                  "--high", "2", "--keep", "p99_ttft_ms<=5", "-o", "/proc/x"])  # fmt: skip


def test_trying_changes_nothing() -> None:
    results.check_output("new", "field")
    assert list(Path().iterdir()) == []
    Path("old").write_text("kept")
    results.check_output("old", "field")
    assert Path("old").read_text() == "kept"
    results.check_output("/dev/null", "field")
