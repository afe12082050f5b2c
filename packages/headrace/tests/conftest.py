"""Makes modules of this folder importable by its tests, and keeps what a test does to logging to itself."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _logging_is_restored() -> Iterator[None]:
    """A command sets logging up, and the process of an engine leaves lines to another: a test that runs such
    code in this process would silence what later tests look for."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("headrace")]
    loggers = [logging.getLogger(name) for name in {"headrace", *names}]
    before = [(one.level, one.propagate, one.disabled, one.handlers[:]) for one in loggers]
    yield
    for one, (level, propagate, disabled, handlers) in zip(loggers, before):
        one.setLevel(level)
        one.propagate, one.disabled, one.handlers[:] = propagate, disabled, handlers
    for name in logging.root.manager.loggerDict:
        if name.startswith("headrace") and name not in names:
            logging.getLogger(name).setLevel(logging.NOTSET)
