"""Recording steps: which ones, into which files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature
from headrace_engine.config import EngineConfig, ProfilerConfig
from headrace_engine.execution.profiling import STEP_MARK, StepProfiler


def make(folder: Path, **settings: Any) -> StepProfiler:
    config = ProfilerConfig(
        profiler="torch", torch_profiler_dir=str(folder), torch_profiler_with_stack=False,
        **settings,
    )  # fmt: skip
    return StepProfiler(config, torch.device("cpu"))


def step(profiler: StepProfiler, count: int = 1) -> None:
    for _ in range(count):
        with profiler.step():
            torch.ones(4).add(1)


def marks(file: Path) -> int:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt") as opened:
        events = json.load(opened)["traceEvents"]
    return sum(e.get("name") == STEP_MARK and e.get("cat") == "user_annotation" for e in events)


def test_delay_and_maximum(tmp_path: Path) -> None:
    profiler = make(tmp_path / "new", delay_iterations=2, max_iterations=3)
    step(profiler)
    profiler.start()
    step(profiler, 9)
    (trace,) = (tmp_path / "new").glob("*.json.gz")
    assert marks(trace) == 3
    (table,) = (tmp_path / "new").glob("*.txt")
    assert STEP_MARK in table.read_text()
    profiler.stop()
    assert len(list((tmp_path / "new").iterdir())) == 2, "stopping again writes nothing"


def test_until_stopped(tmp_path: Path) -> None:
    profiler = make(
        tmp_path, torch_profiler_use_gzip=False, torch_profiler_dump_cuda_time_total=False
    )
    profiler.start()
    with pytest.raises(RequestError, match="already"):
        profiler.start()
    step(profiler, 4)
    profiler.stop()
    step(profiler, 4)
    (trace,) = tmp_path.iterdir()
    assert trace.name.endswith(".pt.trace.json")
    assert marks(trace) == 4


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    for config in (ProfilerConfig(), ProfilerConfig(profiler="cuda")):
        for call in ("start", "stop"):
            with pytest.raises(UnsupportedFeature):
                getattr(StepProfiler(config, cpu), call)()
    step(StepProfiler(ProfilerConfig(), cpu))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"profiler": "torch"}, "torch_profiler_dir"),
        ({"profiler": "torch", "torch_profiler_dir": "relative"}, "torch_profiler_dir"),
        ({"profiler": "perf"}, "profiler"), ({"delay_iterations": -1}, "delay_iterations"),
        ({"ignore_frontend": False}, "ignore_frontend"), ({"delay": 1}, "delay"),
    ],
)  # fmt: skip
def test_settings(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(profiler_config=given)
    assert caught.value.field == f"profiler_config.{field}"
