"""Fixtures: checkpoints made once a session, engines and servers that leave nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import RunningServer, serving


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """transformers and headrace share two cores with whatever else runs."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The demo model with tool calls, of all tests that take a server as it is and leave it so."""
    with serving("--enable-auto-tool-choice", "--tool-call-parser", "hermes") as running:
        yield running
