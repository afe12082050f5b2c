"""The kernels of custom all-reduce compile for real GPUs, and set and read flags with the order they need."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.days(3))])
def test_compiles(tmp_path: Path, capability: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("offline_compile.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = json.loads(done.stdout)
    assert len(compiled) == 8
    for kernel in compiled:
        assert kernel["code_bytes"] > 0
        meetings = 1 if kernel["name"] == "one_shot_kernel" else 2
        events = re.findall(r"bar\.sync|atom\.\S+|[ls][dt]\.global\.v4", kernel["ptx"])
        words = [set(event.split(".")) for event in events]
        released = [
            at for at, word in enumerate(words) if {"release", "sys", "exch", "b64"} <= word
        ]
        acquired = [at for at, word in enumerate(words) if {"acquire", "sys", "add", "u64"} <= word]
        assert len(released) == len(acquired) == meetings, (kernel["name"], kernel["dtype"])
        for release, acquire in zip(released, acquired, strict=True):
            # All threads have written before the flags are set, and none reads before they have been seen.
            assert events[release - 1] == "bar.sync"
            assert "bar.sync" in events[acquire:]
            after = events[acquire + events[acquire:].index("bar.sync") :]
            assert "ld.global.v4" in after, "what others wrote is read 16 bytes at a time"
        assert "st.global.v4" in events[: released[0]], "and is written so"
