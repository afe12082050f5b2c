"""The guards as fixtures. A test asks for one by name; a module can use it for all its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from headrace_testing.guards.lag import LoopLag, guarded_loop
from headrace_testing.guards.leaks import guarded_resources
from headrace_testing.guards.pickles import guarded_pickles
from headrace_testing.guards.sockets import guarded_sockets


@pytest.fixture
def no_network() -> Iterator[None]:
    """A connect to anything but this machine fails the test."""
    with guarded_sockets():
        yield


@pytest.fixture
def no_pickles() -> Iterator[None]:
    """Reading a format that can run code fails the test."""
    with guarded_pickles():
        yield


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Threads, children, open files and shared memory that the test leaves behind fail it."""
    with guarded_resources():
        yield


@pytest.fixture
async def loop_lag() -> AsyncIterator[LoopLag]:
    """The event loop may not be held up for longer than :attr:`LoopLag.limit` seconds."""
    async with guarded_loop() as lag:
        yield lag
