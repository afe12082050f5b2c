"""From an entry to an engine, and back to free memory."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.assembly import connect, starting
from headrace.multi_model.budget import Budget
from headrace.multi_model.entries import ModelEntry, name_of, read_entry
from headrace_core.context import MODEL
from headrace_core.errors import HeadraceError
from headrace_server.multi_model.loading import LoadedModel
from headrace_server.parsing.registry import load_parsers

if TYPE_CHECKING:
    from headrace_engine.engine import Engine

logger = logging.getLogger(__name__)


class EngineLoader:
    """Implements :class:`headrace_server.multi_model.loading.Loader`.

    Args:
        argv: the server's command line, which counts where an entry says nothing.
        budget: of all models together.
    """

    def __init__(self, argv: Sequence[str], budget: Budget) -> None:
        self._words = argv
        self._budget = budget
        self._memory: dict[str, Mapping[str, int]] = {}

    def name_of(self, entry: Mapping[str, Any]) -> str:
        """See :meth:`headrace_server.multi_model.loading.Loader.name_of`."""
        return name_of(entry)

    def read(self, entry: Mapping[str, Any]) -> ModelEntry:
        """An entry as settings; see :func:`headrace.multi_model.entries.read_entry`."""
        found = read_entry(entry, self._words)
        try:
            load_parsers(found.prepared.settings)  # now, not once the weights are read
        except HeadraceError as error:
            error.args = (f"model {found.name!r}: {error}",)
            raise
        return found

    def load(self, entry: Mapping[str, Any]) -> LoadedModel:
        """See :meth:`headrace_server.multi_model.loading.Loader.load`."""
        return self.load_entry(self.read(entry))

    def load_all(self, entries: Sequence[ModelEntry]) -> list[LoadedModel]:
        """The models that a server begins with, one after the other, so that each is measured alone.

        Raises:
            HeadraceError: of the first that could not be loaded, with its name; none is left.
        """
        loaded: list[LoadedModel] = []
        try:
            for position, entry in enumerate(entries):
                loaded.append(self.load_entry(entry, entries[position + 1 :]))
        except BaseException:
            for one in loaded:
                asyncio.run(one.engine.shutdown())
            raise
        return loaded

    def load_entry(self, entry: ModelEntry, coming: Sequence[ModelEntry] = ()) -> LoadedModel:
        """Load a model within its part of the budget.

        Args:
            coming: those that are to be loaded after it, whose parts are kept for them.

        Raises:
            HeadraceError: with the model's name; nothing of it is left.
        """
        token = MODEL.set(entry.name)
        try:
            return self._load(entry, coming)
        finally:
            MODEL.reset(token)

    def _load(self, entry: ModelEntry, coming: Sequence[ModelEntry]) -> LoadedModel:
        asked = self._asked(entry)
        others = [self._asked(other) for other in coming]
        limit = self._budget.limit_of(
            entry.name, asked, others=1 + others.count(None), kept=sum(filter(None, others))
        )
        cache = dataclasses.replace(entry.config.cache, max_memory_bytes=limit)
        settings, config = entry.prepared.settings, entry.config
        logger.info("loading, within %.1f MiB", limit / 2**20)
        try:
            with starting() as timeline:
                engine = connect(
                    dataclasses.replace(config, cache=cache), entry.prepared.templates, timeline
                )
        except BaseException as error:
            self._forget(error)
            if isinstance(error, HeadraceError):
                error.args = (f"model {entry.name!r}: {error}",)
            raise
        taken = _memory_of(engine)
        self._memory[entry.name] = {**taken, "limit": limit}
        self._budget.claim(entry.name, limit, sum(taken.values()), is_share=asked is not None)
        return LoadedModel(engine, settings, timeline.facts())

    def _asked(self, entry: ModelEntry) -> int | None:
        if entry.own_bytes is not None:
            return entry.own_bytes
        return None if entry.share is None else int(self._budget.total * entry.share)

    def unloaded(self, name: str) -> None:
        """See :meth:`headrace_server.multi_model.loading.Loader.unloaded`."""
        self._budget.release(name)
        self._memory.pop(name, None)
        give_back()

    def memory_of(self, name: str) -> Mapping[str, int]:
        """See :meth:`headrace_server.multi_model.loading.Loader.memory_of`."""
        return self._memory.get(name, {})

    @property
    def budget(self) -> Mapping[str, int]:
        """See :attr:`headrace_server.multi_model.loading.Loader.budget`."""
        from headrace_engine.execution.measuring.measure import resident_bytes

        budget = self._budget
        return {
            "total": budget.total,
            "claimed": budget.claimed,
            "free": budget.free,
            "resident": resident_bytes(),
        }

    def _forget(self, error: BaseException) -> None:
        """Free what a start that failed had made: its frames hold it."""
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        give_back()


def give_back() -> None:
    """Return to the system what nobody holds any more: applications and engines are full of cycles,
    and the C library keeps what was freed."""
    from headrace_engine.freed_memory import trim

    gc.collect()
    trim()


def _memory_of(engine: Engine) -> dict[str, int]:
    """Memory use that the workers report, in bytes."""
    from headrace_engine.clients.base import CONTROL_TIMEOUT

    reports = engine.client.call_workers("report").result(CONTROL_TIMEOUT)
    return {
        what: sum(report.get(f"{what}_bytes", 0) for report in reports)
        for what in ("weights", "activations", "cache")
    }
