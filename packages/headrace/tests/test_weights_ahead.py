"""Weights that are packed while torch is imported, through the engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.assembly.ahead.packed import PACKED
from headrace.assembly.ahead.reading import PLANS, start_reading
from headrace.assembly.resolved import resolve_engine
from headrace.assembly.start_costs import CACHE_ROOT
from headrace.engine_args import EngineArgs
from headrace_kernels.cpu import library, packing_ahead

pytestmark = pytest.mark.skipif(library.path() is None, reason="no native library")
SMALL: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 32, "max_num_seqs": 4}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_ROOT, str(tmp_path))
    monkeypatch.setattr(packing_ahead, "SMALLEST", 1)  # the demo model's weights are small
    return tmp_path


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leaves whose weight was packed ahead and used."""
    found: list[str] = []
    take = packing_ahead.PackingAhead.take

    def noted(self: packing_ahead.PackingAhead, name: str, op: Any) -> Any:
        packed = take(self, name, op)
        if packed is not None:
            found.append(name)
        return packed

    monkeypatch.setattr(packing_ahead.PackingAhead, "take", noted)
    return found


def answer(**settings: Any) -> Any:
    """Tokens with their log-probabilities."""
    with LLM(**SMALL, use_tqdm_on_load=False, **settings) as llm:
        return said(llm)


def said(llm: LLM) -> Any:
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
    [output] = llm.generate(["Hello there"], params, use_tqdm=False)
    logprobs = [sorted((i, one.logprob) for i, one in step.items())
                for step in output.outputs[0].logprobs or ()]  # fmt: skip
    return list(output.outputs[0].token_ids), logprobs


def test_the_next_start_has_its_weights_packed_and_says_the_same(
    root: Path, taken: list[str]
) -> None:
    first = answer()
    assert not taken
    [plan] = (root / PLANS).iterdir()
    planned = json.loads(plan.read_text())["weights"]
    second = answer()
    assert sorted(taken) == sorted(planned)
    assert second == first


def resolved(**settings: object) -> Any:
    return resolve_engine(EngineArgs(**{**SMALL, **settings}).create_engine_config())


def test_where_nothing_is_packed_ahead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start_reading(resolved()) is not None
    for settings in (
        {"keep_start_costs": False},
        {"load_format": "dummy"},
        {"safetensors_load_strategy": "eager"},
        {"cpu_bind": "0"},
        {"kernels": {"*": "reference"}},
        {"tensor_parallel_size": 2},
    ):
        assert start_reading(resolved(**settings)) is None, settings
    assert start_reading(resolved(), {CACHE_ROOT: ""}) is None
    crowded = resolved()
    with monkeypatch.context() as little:
        little.setattr(type(crowded.platform), "available_memory", lambda self: 1 << 20)
        assert start_reading(crowded) is None


def written() -> None:
    """Wait for what a start leaves for the next one, as the end of the process does."""
    for thread in threading.enumerate():
        if thread.name == "headrace-keep":
            thread.join(60)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each weight that was taken, True if it is a file's."""
    found: list[bool] = []
    take = packing_ahead.PackingAhead.take

    def noted(self: packing_ahead.PackingAhead, name: str, op: Any) -> Any:
        packed = take(self, name, op)
        if packed is not None:
            found.append(self.is_mapped)
        return packed

    monkeypatch.setattr(packing_ahead.PackingAhead, "take", noted)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_the_next_start_maps_packed_weights_and_says_the_same(
    root: Path, mapped: list[bool]
) -> None:
    first = answer(packed_weights_cache_gb=1)
    assert not mapped
    written()
    assert len([*(root / PACKED).glob("*.weights")]) == 1
    assert answer(packed_weights_cache_gb=1) == first
    written()  # small pages were copied into large ones
    assert mapped
    assert all(mapped)


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_file_that_is_cut_while_its_weights_serve_changes_no_answer(
    root: Path, mapped: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = answer(packed_weights_cache_gb=1)
    written()
    monkeypatch.setattr(packing_ahead.PackingAhead, "settle", bool)
    [file] = (root / PACKED).glob("*.weights")
    with LLM(**SMALL, use_tqdm_on_load=False, packed_weights_cache_gb=1) as llm:
        assert all(mapped)
        assert "map packed weights" in {phase.name for phase in llm.engine.client.timeline.phases}
        code = f"import os; os.chmod({str(file)!r}, 0o600); os.truncate({str(file)!r}, 0)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        assert file.stat().st_size == 0
        assert said(llm) == first
    assert answer(packed_weights_cache_gb=1) == first  # packs, and writes the file again
    written()
    assert file.stat().st_size > 0


@pytest.mark.parametrize(
    "settings", [{"keep_start_costs": False}, {"cpu_bind": "0"}, {"tensor_parallel_size": 2}]
)
def test_who_wants_packed_weights_is_told_that_none_are_kept(
    root: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert start_reading(resolved(packed_weights_cache_gb=1, **settings)) is None
    assert "packed_weights_cache_gb = 1: no packed weights are kept" in caplog.text
    caplog.clear()
    assert start_reading(resolved(**settings)) is None
    assert start_reading(resolved(packed_weights_cache_gb=1)) is not None
    assert not caplog.text


@pytest.mark.parametrize("off", [{}, {"keep_start_costs": False, "packed_weights_cache_gb": 1}])
def test_no_packed_weights_are_kept_unless_they_are_wanted(root: Path, off: dict[str, Any]) -> None:
    answer(**off)
    written()
    assert not (root / PACKED).exists()
