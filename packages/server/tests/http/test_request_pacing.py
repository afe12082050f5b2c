"""A burst of requests begins a few at a time; a health check does not wait for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace_server.http.request_pacing import AdmissionQueue

pytestmark = pytest.mark.req("L3")


class Rounds:
    """An application that notes what began in which round of the loop."""

    def __init__(self) -> None:
        self.begun: list[list[str]] = [[]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun[-1].append(scope["path"])

    def count(self, rounds: int) -> None:
        """Begin a new list in each of the next rounds."""
        if rounds:
            self.begun.append([])
            asyncio.get_running_loop().call_soon(self.count, rounds - 1)


def begin(turns: AdmissionQueue, *paths: str) -> list[asyncio.Task[None]]:
    return [
        asyncio.ensure_future(turns({"type": "http", "path": path}, None, None))  # type: ignore[arg-type]
        for path in paths
    ]


async def test_so_many_begin_in_each_round_and_in_their_order() -> None:
    app = Rounds()
    paths = [f"/{number}" for number in range(20)]
    tasks = begin(AdmissionQueue(app, per_round=3), *paths)
    app.count(12)
    await asyncio.gather(*tasks)
    assert [path for round_ in app.begun for path in round_] == paths
    assert max(map(len, app.begun)) == 3


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz"])
async def test_a_health_check_does_not_wait(path: str) -> None:
    app = Rounds()
    tasks = begin(AdmissionQueue(app, per_round=2), *[f"/{number}" for number in range(20)], path)
    await asyncio.sleep(0)
    assert app.begun == [["/0", "/1", path]]
    await asyncio.gather(*tasks)
    assert len(app.begun[0]) == 21


async def test_who_gives_up_takes_nobody_elses_turn() -> None:
    app = Rounds()
    first, left, last = begin(AdmissionQueue(app, per_round=1), "/first", "/left", "/last")
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.gather(first, last)
    assert app.begun == [["/first", "/last"]]
    assert left.cancelled()


async def test_one_at_a_time_never_waits() -> None:
    app = Rounds()
    turns = AdmissionQueue(app, per_round=1)
    for number in range(5):
        coroutine = turns({"type": "http", "path": f"/{number}"}, None, None)  # type: ignore[arg-type]
        with pytest.raises(StopIteration):
            coroutine.send(None)
        for _ in range(2):
            await asyncio.sleep(0)  # a round
    assert len(app.begun[0]) == 5
