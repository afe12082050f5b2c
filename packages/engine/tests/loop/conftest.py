"""Make the shared fakes importable, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
for folder in (TESTS / "loop", TESTS / "input_processing"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
