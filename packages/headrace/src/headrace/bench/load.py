"""Sends the requests in time and collects what came back.

On the way nothing is parsed: a client that shares the machine with the server must not take its time
(see :mod:`headrace.bench.http`). Answers are read once the run is over, or before that when they fill
:data:`MOST_KEPT`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.bench.backends import Backend
from headrace.bench.datasets import SampleRequest
from headrace.bench.http import Client, HttpError, HttpResponse
from headrace.bench.metrics import Outcome

MOST_KEPT = 512 << 20
"""Bytes of answers that may wait to be read."""


class PreparedRequest(NamedTuple):
    """A request that is ready to be sent."""

    sample: SampleRequest
    body: bytes
    headers: dict[str, str]


@dataclass
class LoadResult:
    """Results of a run."""

    outcomes: list[Outcome]
    """In the order of the calls."""
    ends: list[float]
    """Seconds after the start at which each request was over."""
    duration: float
    """From the start to the end of the last request, in seconds."""


@dataclass
class LoadGenerator:
    """One run against one server.

    Args:
        times: seconds after the start at which each call is due, ascending.
        max_concurrency: most requests under way at once; a call that has to wait is sent, and timed, when
            its turn comes. None: no bound.
        on_end: called after each request.
    """

    client: Client
    backend: Backend
    path: str
    calls: Sequence[PreparedRequest]
    times: Sequence[float]
    max_concurrency: int | None = None
    on_end: Callable[[], object] = lambda: None
    _outcomes: dict[int, Outcome] = field(default_factory=dict)
    _answers: dict[int, HttpResponse] = field(default_factory=dict)
    _ends: dict[int, float] = field(default_factory=dict)
    _kept: int = 0
    _begin: float = 0.0

    async def run(self) -> LoadResult:
        """Send everything; returns when the last answer is there."""
        gate = asyncio.Semaphore(self.max_concurrency or max(1, len(self.calls)))
        with _no_collection():
            self._begin = time.perf_counter()
            tasks = []
            for index, due in enumerate(self.times):
                wait = self._begin + due - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self._one(index, gate)))
            await asyncio.gather(*tasks)
            duration = time.perf_counter() - self._begin
        self._read()
        order = range(len(self.calls))
        return LoadResult(
            [self._outcomes[i] for i in order], [self._ends[i] for i in order], duration
        )

    async def _one(self, index: int, gate: asyncio.Semaphore) -> None:
        call = self.calls[index]
        async with gate:
            started = time.perf_counter()
            try:
                answer = await self.client.post(self.path, call.body, call.headers)
            except HttpError as error:
                self._outcomes[index] = Outcome(started - self._begin, error=str(error))
            else:
                self._answers[index] = answer
                self._kept += sum(len(piece.data) for piece in answer.pieces)
            self._ends[index] = time.perf_counter() - self._begin
        if self._kept > MOST_KEPT:
            self._read()
        self.on_end()

    def _read(self) -> None:
        for index, answer in self._answers.items():
            sample = self.calls[index].sample
            self._outcomes[index] = self.backend.outcome(answer, sample, self._begin)
        self._answers.clear()
        self._kept = 0


@contextmanager
def _no_collection() -> Iterator[None]:
    """No pause of the garbage collector inside: what is kept here has no cycles."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
