"""Fixtures: checkpoints made once a session, engines and servers that leave nothing behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """transformers and headrace share two cores with whatever else runs."""
    import torch

    torch.set_num_threads(1)
