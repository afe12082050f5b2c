"""Bounds how many requests begin in one round of the event loop.

Reading, checking and converting a request takes a millisecond or two of the loop's thread. A thousand that
come within a second would all be taken up at once: a health check, whose own work is nothing, would wait
for all of them at each of its steps, and all would hold the memory of a half-handled request.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_server.http.paths import OPEN_PATHS, route_path

PER_ROUND = 8
"""Requests that begin in one round of the event loop: about 10 ms of work."""


class AdmissionQueue:
    """Lets requests begin in their order, so many in each round of the loop; health checks at once.

    Args:
        app: the application.
        per_round: requests that may begin in one round.
    """

    def __init__(self, app: ASGIApp, per_round: int = PER_ROUND) -> None:
        self._app = app
        self._per_round = self._left = per_round
        self._counting = False
        """True while the next round will be told to begin."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            await self._turn()
        await self._app(scope, receive, send)

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._counting:
            self._counting = True
            loop.call_soon(self._next_round, loop)
        if self._left:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_round(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = self._per_round
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: the server gave up on it
                turn.set_result(None)
                self._left -= 1
        self._counting = self._left < self._per_round
        if self._counting:
            loop.call_soon(self._next_round, loop)
