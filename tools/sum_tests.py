"""Add up the closing lines of all pytest runs in a log: ``python tools/sum_tests.py LOG``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path


def count(text: str) -> Counter[str]:
    """Outcomes over all closing lines (``=== 3 passed, 1 skipped in 0.1s ===``)."""
    totals: Counter[str] = Counter()
    for line in re.findall(r"^=+ (.*) in [\d.]+s.*=+$", text, re.MULTILINE):
        for number, outcome in re.findall(r"(\d+) (passed|failed|error|skipped)", line):
            totals["failed" if outcome == "error" else outcome] += int(number)
    return totals


def main() -> None:
    totals = count(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")


if __name__ == "__main__":
    main()
