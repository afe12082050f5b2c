"""The README's picture shows what the tables of docs/performance.md say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_picture_is_of_the_tables() -> None:
    picture = ROOT / "docs" / "images" / "comparison.svg"
    assert str(picture.relative_to(ROOT)) in (ROOT / "README.md").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "chart.py"), "--print"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == picture.read_text(encoding="utf-8"), "run: python benchmarks/chart.py"
