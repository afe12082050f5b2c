from __future__ import annotations

import subprocess
import sys

MODULES = (
    "headrace_engine.kv.block_pool",
    "headrace_engine.kv.grouping",
    "headrace_engine.kv.hashing",
    "headrace_engine.kv.manager",
    "headrace_engine.scheduler.scheduler",
)


def test_the_control_plane_imports_no_torch() -> None:
    code = f"import sys, {', '.join(MODULES)}; print([m for m in sys.modules if m == 'torch'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
