"""Make the shared fakes importable, here and in child processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
for folder in (Path(__file__).parent, TESTS / "loop", TESTS / "input_processing"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from engine_fakes import ChildSteps  # noqa: E402


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChildSteps]:
    """The steps of children whose story is ``held``."""
    made = ChildSteps(tmp_path, monkeypatch)
    yield made
    made.close()
