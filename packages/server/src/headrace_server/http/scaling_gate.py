"""Engines that are being scaled, and requests that are refused meanwhile if the operator says so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_server.errors.mapping import ErrorAnswer
from headrace_server.http.paths import route_path


class Scaling:
    """The change of the number of engines that is under way, if one is."""

    def __init__(self) -> None:
        self.num_engines = 0
        """Engines that there will be."""
        self._task: asyncio.Task[int] | None = None
        self._refuses = False

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def refuses_requests(self) -> bool:
        return self._refuses and self.is_under_way

    def begin(
        self, work: Coroutine[Any, Any, int], num_engines: int, *, refuses_requests: bool
    ) -> asyncio.Task[int]:
        """Begin one. The task goes on whoever waits for it."""
        self.num_engines, self._refuses = num_engines, refuses_requests
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(
            _take_error
        )  # nobody may be left who waits; the engine logs it
        return self._task


class ScalingGate:
    """ASGI middleware: 503 for requests that an engine would compute, while it is scaled so.

    Args:
        paths: of these requests.
    """

    def __init__(self, app: ASGIApp, scaling: Scaling, paths: Collection[str]) -> None:
        self._app = app
        self._scaling = scaling
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            self._scaling.refuses_requests
            and scope["type"] == "http"
            and route_path(scope) in self._paths
        ):
            reply = ErrorAnswer(
                503, "the engines are being scaled; try again", headers={"Retry-After": "1"}
            )
            await reply.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _take_error(task: asyncio.Task[int]) -> None:
    if not task.cancelled():
        task.exception()
