"""Kernels stay within the tensors that they are given, on every instruction set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace_kernels.cpu import library

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected by Linux's mprotect")
def test_nothing_is_touched_behind_a_tensor() -> None:
    script = Path(__file__).parent / "ends_of_memory.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    last = done.stdout.strip().splitlines()[-1:]
    assert done.returncode == 0, f"ended in {last}: {done.stderr[-2000:]}"
    assert last == [f"{library.levels()[-1]} bfloat16 round_k_quant, 6"]
