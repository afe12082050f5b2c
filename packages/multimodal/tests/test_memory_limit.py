"""The memory limit of a decoder's process that was itself started under one (``ulimit -v``)."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from headrace_multimodal.memory_limit import limit_memory
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
limit_memory(1 << 40)
found = [resource.getrlimit(resource.RLIMIT_AS)]
limit_memory(2 << 30)
print([*found, resource.getrlimit(resource.RLIMIT_AS)])
"""


def test_it_is_never_above_the_one_that_holds_already() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.stdout.strip() == f"[({3 << 30}, {3 << 30}), ({2 << 30}, {3 << 30})]", run.stderr
