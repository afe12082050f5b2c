"""The models that are served now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field

import fastapi.dependencies.models
from fastapi import FastAPI

from headrace_core.errors import UnknownModel
from headrace_server.state import ServerState

logger = logging.getLogger(__name__)

LAST_WORDS = 2.0
"""Seconds for requests that were ended early to say so."""


@dataclass(eq=False)
class OneModel:
    """A model and the application that it would have alone."""

    app: FastAPI
    state: ServerState
    num_requests: int = 0
    """Requests that were dispatched to it and are not answered yet."""
    _lifespan: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def name(self) -> str:
        return self.state.engine.model.name

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count a request for the time of the block."""
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1

    async def begin(self) -> None:
        """Run its application's part before the first request."""
        await self._lifespan.enter_async_context(self.app.router.lifespan_context(self.app))

    async def drain(self, seconds: float) -> None:
        """Let its requests finish for so long, then end them."""
        lifecycle = self.state.lifecycle
        lifecycle.begin_drain()
        if not await self._wait_idle(seconds):
            lifecycle.stop_all()
            await self._wait_idle(LAST_WORDS)

    async def _wait_idle(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.num_requests:
                    await asyncio.sleep(_LOOK)
        except TimeoutError:
            return False
        return True

    async def end(self) -> None:
        """Free everything."""
        await self._lifespan.aclose()
        await self.state.engine.shutdown()
        if self.state.tracing is not None:
            await asyncio.to_thread(self.state.tracing.shutdown)
        _forget_routes()


def _forget_routes() -> None:
    """FastAPI remembers of some thousand functions what kind they are, and so keeps what routes that
    are gone close over: the application, and all that was read for its engine."""
    for value in vars(fastapi.dependencies.models).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


_LOOK = 0.02
"""Seconds between looks whether requests still run."""


class Models:
    """Served models by name, in the order in which they came. Of one event loop.

    It stands for all engines where a server asks one how it is.
    """

    def __init__(self) -> None:
        self._models: dict[str, OneModel] = {}
        self._by_name: dict[str, OneModel] = {}

    def __iter__(self) -> Iterator[OneModel]:
        return iter(list(self._models.values()))

    def __len__(self) -> int:
        return len(self._models)

    @property
    def names(self) -> list[str]:
        """All names under which something is served."""
        return list(self._by_name)

    def add(self, model: OneModel) -> None:
        """Serve it from now on, under all its names, which are free."""
        self._models[model.name] = model
        for name in model.state.engine.model.names:
            assert name not in self._by_name, f"{name} is served twice"
            self._by_name[name] = model

    def remove(self, model: OneModel) -> None:
        """No further request finds it."""
        del self._models[model.name]
        for name in model.state.engine.model.names:
            del self._by_name[name]

    def find(self, name: str) -> OneModel:
        """Raises: UnknownModel, naming those that are served."""
        if name not in self._by_name:
            served = ", ".join(map(repr, self._by_name)) or "none at present"
            raise UnknownModel(f"model {name[:256]!r} is not served; served: {served}",
                               param="model")  # fmt: skip
        return self._by_name[name]

    @property
    def dead_error(self) -> BaseException | None:
        """Why nothing can be served any more: every engine is dead. One that lives goes on, and the
        dead are seen in the health and can be unloaded."""
        errors = [model.state.engine.dead_error for model in self]
        return next(iter(errors), None) if all(errors) else None

    async def check_health(self) -> None:
        """Raises: EngineDead, if any engine stopped or is stuck."""
        for model in self:
            await model.state.engine.check_health()

    async def shutdown(self) -> None:
        """Stop all engines and free everything."""
        for model in self:
            self.remove(model)
            await model.end()
