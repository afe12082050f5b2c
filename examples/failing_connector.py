"""A KV connector some of whose blocks cannot be loaded: see kv_load_failure_recovery.py."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headrace_distributed.kv_connectors.file import FileConnector

SECONDS = 0.05
"""How long blocks are on their way, with ``async_load``."""


class FailingConnector(FileConnector):
    """The connector ``file``, which loses every third block that it is asked for.

    ``async_load`` in ``kv_connector_extra_config``: blocks are brought near first, while the request waits,
    and those that are lost have gone by then. Otherwise it shows when they are loaded.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        extra = dict(settings["kv_connector_extra_config"])
        self._fetches = extra.pop("async_load", False)
        super().__init__({**settings, "kv_connector_extra_config": extra})
        self._lost: set[bytes] = set()
        self._arrivals: dict[str, float] = {}

    def contains(self, key: bytes) -> bool:
        return key not in self._lost and super().contains(key)

    def load(self, key: bytes, into: memoryview) -> bool:
        if key in self._lost or is_lost(key):
            self._lost.add(key)
            return False
        return super().load(key, into)

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        if not self._fetches:
            return super().fetch(request_id, blocks, params)
        now = time.monotonic()
        if now < self._arrivals.setdefault(request_id, now + SECONDS):
            return True
        self._lost |= set(filter(is_lost, blocks))
        self.forget(request_id)
        return False

    def forget(self, request_id: str) -> None:
        self._arrivals.pop(request_id, None)
        super().forget(request_id)


def is_lost(key: bytes) -> bool:
    """True for every third block, always the same ones."""
    return key[0] % 3 == 0
