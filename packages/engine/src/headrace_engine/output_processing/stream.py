"""One consumer of one request, on the event loop: it pulls outputs one by one, or has them pushed.

Pulling wakes a task for every output, which costs several times what the output itself does. Pushing
calls the consumer in the round of the loop that takes a step's outputs in, all requests of the step
in one go: no future, no task switch. See :class:`headrace_core.engine.OutputStream`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from headrace_core.output import RequestOutput
from headrace_engine.output_processing.output import StreamState
from headrace_engine.output_processing.pooled import PooledState

Take = Callable[[RequestOutput], bool]
TakeText = Callable[[str, int], bool]


class OutputChannel:
    """The way of one request's outputs to its consumer. Made before the request is taken in."""

    __slots__ = ("_take", "_take_text", "_waiter", "decided", "state")

    def __init__(self) -> None:
        self.decided = asyncio.Event()
        """Set once the request is under way, or refused."""
        self.state: StreamState | PooledState | None = None
        """Set once the request is under way."""
        self._take: Take | None = None
        self._take_text: TakeText | None = None
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        """The request has changed: push its output, or wake whoever waits for one."""
        state = self.state
        if self._take is not None:
            self._push_one(self._take)
        elif state is not None and (state.ready or state.error is not None):
            self.wake()

    def wake(self) -> None:
        """End :meth:`wait` or :meth:`push`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for an output that comes after this call: the caller has looked at what there is."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def push(self, take: Take, take_text: TakeText | None) -> None:
        """Push until the consumer refuses, the request ends or fails, or somebody calls :meth:`wake`."""
        self._take, self._take_text = take, take_text
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            self._push_one(take)  # what has come meanwhile
            await self._waiter
        finally:
            self._take = self._take_text = self._waiter = None

    def _push_one(self, take: Take) -> None:
        state = self.state
        assert isinstance(state, StreamState)
        assert self._waiter is not None
        if self._waiter.done():
            return  # refused, and not yet asked for more
        try:
            if self._take_text is not None and (text := state.take_text()) is not None:
                more = self._take_text(*text)
            else:
                output = state.take() if state.error is None else None
                more = output is None or take(output)
        except Exception as error:  # the consumer's own: its, not the loop's
            self._waiter.set_exception(error)
            return
        if not more or state.exhausted or state.error is not None:
            self.wake()


class EngineOutputs(AsyncIterator[RequestOutput]):
    """A :class:`headrace_core.engine.OutputStream`.

    Args:
        pulled: yields the outputs; closing it ends the request.
        channel: of the same request.
        check: raises what has gone wrong with the request.
    """

    def __init__(
        self,
        pulled: AsyncGenerator[RequestOutput, None],
        channel: OutputChannel,
        check: Callable[[StreamState], None],
    ) -> None:
        self._pulled = pulled
        self._channel = channel
        self._check = check

    async def __anext__(self) -> RequestOutput:
        return await self._pulled.__anext__()

    async def decided(self) -> None:
        """See :meth:`headrace_core.engine.OutputStream.decided`."""
        await self._channel.decided.wait()

    async def aclose(self) -> None:
        """End the request if it still runs."""
        await self._pulled.aclose()

    async def push(self, take: Take, take_text: TakeText | None = None) -> None:
        """See :meth:`headrace_core.engine.OutputStream.push`."""
        state = self._channel.state
        if not isinstance(state, StreamState):
            raise RuntimeError("push: the first output must be taken by iterating")
        if not state.exhausted:
            self._check(state)
            await self._channel.push(take, take_text)
            if not state.exhausted:
                self._check(state)
