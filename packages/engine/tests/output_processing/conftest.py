"""Make the shared fakes importable, here and in child processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
for folder in (TESTS / "loop", TESTS / "input_processing", TESTS / "output_processing"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from trained_tokenizers import Load, loader  # noqa: E402


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Tokenizers by kind."""
    return loader(tmp_path_factory)
