"""A store of adapters that reads when a test tells it to."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from headrace_engine.lora.store import AdapterStore, KnownAdapter


class StepwiseStore(AdapterStore):
    """An adapter's content is its path.

    Args:
        at_once: read without being told.
        changes_media: whether its adapters change towers.
    """

    def __init__(
        self, num_kept: int, *, at_once: bool = False, changes_media: bool = False
    ) -> None:
        super().__init__(num_kept)
        self._changes_media = changes_media
        self.pending: deque[tuple[KnownAdapter, Future[Any]]] = deque()
        self.num_read = 0
        self._at_once = at_once

    def _read(self, adapter: KnownAdapter) -> Future[Any]:
        adapter.reading = reading = Future[Any]()
        self.pending.append((adapter, reading))
        if self._at_once:
            self.go_on()
        return reading

    def go_on(self, error: Exception | None = None) -> bool:
        """End the oldest reading; False: there is none."""
        if not self.pending:
            return False
        self.num_read += 1
        adapter, reading = self.pending.popleft()
        if error is None:
            path = adapter.request.lora_path
            reading.set_result(SimpleNamespace(digest=path, changes_media=self._changes_media))
        else:
            reading.set_exception(error)
        self._take(adapter, None, reading)
        return True
