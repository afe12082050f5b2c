"""The connector ``offload``: memory, and behind it a folder, for blocks that the pools give up."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.background_writer import BackgroundWriter
from headrace_distributed.kv_connectors.block_folder import HEADER_BYTES, BlockFolder
from headrace_distributed.kv_connectors.extra import (
    EXTRA,
    extra_of,
    folder_of,
    number_of_bytes,
    wrong,
)

logger = logging.getLogger(__name__)

MEMORY, DISK, DISK_BYTES = "cpu_bytes_to_use", "disk_path", "disk_bytes_to_use"


class OffloadConnector(KVConnector):
    """Blocks are kept in memory of at most ``cpu_bytes_to_use`` bytes; those that were used longest ago leave
    it. With ``disk_path``, all are written to a folder of at most ``disk_bytes_to_use`` bytes, too, which the
    next start finds: then blocks are taken as they become full, as a pool is lost at the end. Each rank of an
    engine has its share of the bytes, and a folder of its own in that folder.

    Raises:
        ConfigError: a size is missing or wrong, or the folder cannot be used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        extra = extra_of(settings, MEMORY, DISK, DISK_BYTES)
        rank, num_ranks = settings.get("rank", 0), settings.get("num_ranks", 1)
        self._num_ranks = num_ranks
        max_bytes = number_of_bytes(extra, MEMORY)
        if max_bytes is None:
            raise wrong(MEMORY, None, "bytes of memory for blocks")
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if max_bytes > installed:
            raise wrong(MEMORY, extra[MEMORY], f"at most {installed}, this machine's memory")
        self._max_bytes = max_bytes // num_ranks
        self._blocks: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._folder, self._writer = None, None
        root, disk_bytes = folder_of(extra, DISK, writes=True), number_of_bytes(extra, DISK_BYTES)
        self._stated = {MEMORY: max_bytes, DISK_BYTES: disk_bytes}
        if (root is None) != (disk_bytes is None):
            given, missing = (DISK, DISK_BYTES) if disk_bytes is None else (DISK_BYTES, DISK)
            raise wrong(missing, None, f"given with {given}")
        self.saves_full_blocks = root is not None
        if root is not None:
            own = root if num_ranks == 1 else root / f"rank-{rank}-of-{num_ranks}"
            own.mkdir(exist_ok=True, mode=0o700)
            self._folder = BlockFolder(own, None if disk_bytes is None else disk_bytes // num_ranks)
            self._writer = BackgroundWriter(self._folder)
            if not self._folder.is_alone:
                logger.warning(
                    "%s.%s = %r: another engine uses this folder, too: each of both counts its own files "
                    "only, so that they take more than %s; give each engine a folder of its own",
                    EXTRA, DISK, extra[DISK], DISK_BYTES,
                )  # fmt: skip

    def contains(self, key: bytes) -> bool:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return True
        if self._writer is not None and self._writer.pending(key) is not None:
            return True
        return self._folder is not None and self._folder.contains(key)

    def load(self, key: bytes, into: memoryview) -> bool:
        with self._lock:
            content = self._blocks.get(key)
            if content is not None:
                self._blocks.move_to_end(key)
        if content is None and self._writer is not None:
            content = self._writer.pending(key)
        if content is not None:
            if len(content) != into.nbytes:
                return False
            into[:] = content
            return True
        if self._folder is None or not self._folder.load(key, into):
            return False
        self._keep(key, bytes(into))
        return True

    def save(self, key: bytes, content: memoryview) -> None:
        if self.contains(key):
            return
        copied = bytes(content)
        self._keep(key, copied)
        if self._writer is not None:
            self._writer.write(key, copied)

    def check_block(self, num_bytes: int) -> None:
        ranks = self._num_ranks
        where = "" if ranks == 1 else f" on each of {ranks} ranks"
        for name, size, what in (
            (MEMORY, num_bytes, "a block"),
            (DISK_BYTES, num_bytes + HEADER_BYTES, "a block's file"),
        ):
            stated = self._stated[name]
            if stated is not None and stated // ranks < size:
                raise wrong(name, stated, f"at least {size * ranks}, the bytes of {what}{where}")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._folder is not None:
            self._folder.close()

    def _keep(self, key: bytes, content: bytes) -> None:
        """Put a block into memory, and others out of it."""
        if len(content) > self._max_bytes:
            return
        with self._lock:
            self._num_bytes += len(content) - len(self._blocks.pop(key, b""))
            self._blocks[key] = content
            while self._num_bytes > self._max_bytes:
                _, gone = self._blocks.popitem(last=False)
                self._num_bytes -= len(gone)
