"""``examples/reproducibility.py`` prints the same in every run; the variable is held to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import LLM
from headrace_core.errors import ConfigError

EXAMPLE = Path(__file__).parents[1] / "examples" / "reproducibility.py"


def run() -> str:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), "--max-model-len", "256"],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "HEADRACE_BATCH_INVARIANT": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_example_prints_the_same_twice() -> None:
    first = run()
    assert first.count(" -> ") == 4
    assert "alone and among the others: True" in first
    assert "a number: 0." in first
    assert run() == first


def test_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", "1")
    with pytest.raises(ConfigError, match=r"in use \(reference\) do not keep to it"):
        LLM(kernels={"*": "reference"}, max_model_len=64)
    monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", "true")
    with pytest.raises(ConfigError, match="HEADRACE_BATCH_INVARIANT = 'true': must be 1, or 0"):
        LLM(max_model_len=64)
    monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", "0")
    with LLM(kernels={"*": "reference"}, max_model_len=64, kv_cache_memory_bytes=1 << 20):
        pass
