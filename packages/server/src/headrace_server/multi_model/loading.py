"""Bringing models and taking them away, while others are served."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from headrace_core.engine import EngineClient
from headrace_core.errors import HeadraceError, RequestError
from headrace_server.multi_model.models import Models, OneModel
from headrace_server.observability.metrics import fresh_stats, is_healthy
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LoadedModel(NamedTuple):
    """A model that could be served."""

    engine: EngineClient
    settings: ServerSettings
    """The server's, with what this model sets for itself."""
    startup: Mapping[str, Any] | None = None
    """Times of loading it; see :attr:`headrace_server.state.Serving.startup`."""


class Loader(Protocol):
    """Makes engines of entries, within a budget of memory. Called from one thread at a time."""

    def name_of(self, entry: Mapping[str, Any]) -> str:
        """Under which the entry's model is to be served.

        Raises:
            ConfigError: the entry has none.
        """
        ...

    def load(self, entry: Mapping[str, Any]) -> LoadedModel:
        """Load a model. Takes its time.

        Raises:
            HeadraceError: whatever is wrong with the entry, or keeps it from loading; nothing of it
                is left.
        """
        ...

    def unloaded(self, name: str) -> None:
        """A model's engine was shut down: give back what it leaves."""
        ...

    def memory_of(self, name: str) -> Mapping[str, int]:
        """Memory that a loaded model takes: purpose -> bytes."""
        ...

    @property
    def budget(self) -> Mapping[str, int]:
        """Bytes that all models together may take, and that they take now."""
        ...


class NameTaken(RequestError):
    """A model of that name is served, or being loaded."""


class Loading:
    """Loads and unloads, one model at a time.

    Args:
        models: those that are served.
        loader: makes engines.
        compose: makes an application of an engine.
    """

    def __init__(
        self, models: Models, loader: Loader, compose: Callable[[LoadedModel], OneModel]
    ) -> None:
        self._models = models
        self._loader = loader
        self._compose = compose
        self._turn = asyncio.Lock()
        self._coming: list[str] = []
        self._leaving: list[OneModel] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(self, entry: Mapping[str, Any]) -> OneModel:
        """Load a model and serve it. Goes on if the caller gives up.

        Raises:
            NameTaken: by another model.
            HeadraceError: it could not be loaded; the others are as they were.
        """
        name = self._loader.name_of(entry)
        taken = [*self._models.names, *self._coming, *(m.name for m in self._leaving)]
        if name in taken:
            raise NameTaken(f"name: {name[:256]!r} is taken; unload that model first", param="name")
        self._coming.append(name)
        return await self._to_the_end(self._load(name, entry))

    async def _load(self, name: str, entry: Mapping[str, Any]) -> OneModel:
        try:
            async with self._turn:
                loaded = await asyncio.to_thread(self._loader.load, entry)
                try:
                    self._check_names(loaded)
                    model = self._compose(loaded)
                    await model.begin()
                except BaseException:
                    await loaded.engine.shutdown()
                    await asyncio.to_thread(self._loader.unloaded, name)
                    raise
                self._models.add(model)
        except HeadraceError as error:
            logger.warning("model %r was not loaded: %s", name, error)
            raise
        finally:
            self._coming.remove(name)
        logger.info("model %r is served", name)
        return model

    def _check_names(self, loaded: LoadedModel) -> None:
        taken = set(self._models.names) & set(loaded.engine.model.names)
        if taken:
            raise NameTaken(f"served_model_name: {sorted(taken)} are taken", param="name")

    async def unload(self, name: str, drain_seconds: float) -> None:
        """Stop serving a model: no further request finds it, those that run may finish for so long.
        Returns once its memory is free. Goes on if the caller gives up.

        Raises:
            UnknownModel: it is not served.
        """
        model = self._models.find(name)
        self._models.remove(model)
        self._leaving.append(model)
        work = self._unload(model, drain_seconds)
        del model  # what it held is to be found free at the end
        await self._to_the_end(work)

    async def _unload(self, model: OneModel, drain_seconds: float) -> None:
        name = model.name
        try:
            await model.drain(drain_seconds)
            async with self._turn:
                await model.end()
                self._leaving.remove(model)
                del model
                await asyncio.to_thread(self._loader.unloaded, name)
        finally:
            self._leaving = [other for other in self._leaving if other.name != name]
        logger.info("model %r is unloaded", name)

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def finish(self) -> None:
        """Wait until nothing comes or leaves any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def budget(self) -> Mapping[str, int]:
        """See :attr:`Loader.budget`."""
        return self._loader.budget

    async def list(self) -> list[dict[str, Any]]:
        """Every model with its state: ``loading``, ``ready``, ``paused``, ``asleep``, ``draining`` or
        ``dead``."""
        return [
            *[await self._describe(model) for model in self._models],
            *[await self._describe(model, "draining") for model in self._leaving],
            *[{"name": name, "state": "loading"} for name in self._coming],
        ]

    async def _describe(self, model: OneModel, state: str = "") -> dict[str, Any]:
        served = model.state.engine.model
        return {
            "name": model.name,
            "state": state or await _state_of(model),
            "names": list(served.names),
            "root": served.root,
            "tasks": sorted(served.tasks),
            "requests_in_flight": model.num_requests,
            "memory": dict(self._loader.memory_of(model.name)),
        }


async def _state_of(model: OneModel) -> str:
    if not await is_healthy(model.state.engine):
        return "dead"
    if await model.state.engine.is_paused():
        return "paused"
    stats = await fresh_stats(model.state.engine)
    return "asleep" if stats is not None and stats.sleep_level else "ready"
