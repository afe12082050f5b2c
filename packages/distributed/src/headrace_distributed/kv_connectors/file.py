"""The connector ``file``: blocks in a folder that engines share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.background_writer import BackgroundWriter
from headrace_distributed.kv_connectors.block_folder import BlockFolder
from headrace_distributed.kv_connectors.extra import extra_of, folder_of, wrong

PATH = "shared_storage_path"
WAIT_SECONDS = 2.0
"""Longest wait for blocks that another engine has promised: it may still write them."""


class FileConnector(KVConnector):
    """Each block is written as it becomes full, so that another engine finds it. The folder is not bounded:
    whoever shares it decides what goes.

    Raises:
        ConfigError: ``shared_storage_path`` is missing, or no folder that can be used.
    """

    saves_full_blocks = True

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        extra = extra_of(settings, PATH)
        root = folder_of(extra, PATH, writes=settings["kv_role"] != "kv_consumer")
        if root is None:
            raise wrong(PATH, None, "a folder that engines share")
        self._folder = BlockFolder(root)
        self._writer = BackgroundWriter(self._folder)
        self._waits_until: dict[str, float] = {}

    def contains(self, key: bytes) -> bool:
        return self._writer.pending(key) is not None or self._folder.contains(key)

    def load(self, key: bytes, into: memoryview) -> bool:
        pending = self._writer.pending(key)
        if pending is not None and len(pending) == into.nbytes:
            into[:] = pending
            return True
        return self._folder.load(key, into)

    def save(self, key: bytes, content: memoryview) -> None:
        if not self.contains(key):
            self._writer.write(key, bytes(content))

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        promised = params and "remote_host" not in params  # by an engine that writes here
        if not promised or all(map(self.contains, blocks)):
            self.forget(request_id)
            return False
        now = time.monotonic()
        if now < self._waits_until.setdefault(request_id, now + WAIT_SECONDS):
            return True
        self.forget(request_id)
        return False

    def forget(self, request_id: str) -> None:
        self._waits_until.pop(request_id, None)

    def close(self) -> None:
        self._writer.close()
