"""Several prompts of one request: their outputs come together, their refusals come first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_core.errors import RequestError
from headrace_core.output import RequestOutput
from headrace_server.streaming.event_stream import merge


class Stream(AsyncIterator[RequestOutput]):
    """An output stream whose request is under way, or refused, when the test says so."""

    def __init__(self, items: list[RequestOutput], error: Exception | None = None) -> None:
        self.go = asyncio.Event()
        self._items, self._error = items, error
        self._decided = asyncio.Event()
        self.taken = asyncio.Event()
        """An item has left for whoever merges."""
        self.closed = False

    async def __anext__(self) -> RequestOutput:
        await self.go.wait()
        self._decided.set()
        if self._error is not None:
            raise self._error
        if not self._items:
            raise StopAsyncIteration
        self.taken.set()
        return self._items.pop(0)

    async def decided(self) -> None:
        await self._decided.wait()

    async def aclose(self) -> None:
        self.closed = True

    async def push(
        self,
        take: Callable[[RequestOutput], bool],
        take_text: Callable[[str, int], bool] | None = None,
    ) -> None:
        raise AssertionError("merged streams are iterated")


def output(request_id: str) -> RequestOutput:
    return RequestOutput(request_id, None, [1], [], finished=False)


async def test_a_refusal_comes_before_the_items_of_others() -> None:
    ready, refused = Stream([output("a")]), Stream([], RequestError("too long", param="prompt"))
    merged = merge([ready, refused])
    first = asyncio.ensure_future(anext(merged))
    ready.go.set()
    await ready.taken.wait()
    refused.go.set()
    with pytest.raises(RequestError, match="too long"):
        await first
    assert ready.closed
    assert refused.closed


async def test_items_come_once_all_are_under_way() -> None:
    streams = [Stream([output("a"), output("b")]), Stream([output("c")])]
    for stream in streams:
        stream.go.set()
    got = [(position, item.request_id) async for position, item in merge(streams)]
    assert sorted(got) == [(0, "a"), (0, "b"), (1, "c")]


async def test_streams_that_cannot_tell_are_not_waited_for() -> None:
    async def plain() -> AsyncIterator[int]:
        yield 1

    assert [item async for item in merge([plain(), plain()])] == [(0, 1), (1, 1)]
