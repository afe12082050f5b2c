"""The connector ``lmcache``: blocks in the stores of LMCache (memory, disks, servers), by its own settings.

LMCache's storage manager is used as a store of bytes by key; its adapters for engines, which know tokens and
layers, are not. An entry is a digest and a block's content: LMCache checks neither files nor servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.kv import KVConnector
from headrace_distributed.kv_connectors.extra import extra_of, wrong

CONFIG_FILE, NATIVE = "config_file", "use_native"
ENVIRONMENT = "LMCACHE_CONFIG_FILE"
DIGEST_BYTES = 32


class LMCacheLibrary(NamedTuple):
    """What is used of LMCache."""

    read_config: Callable[[str | None], Any]
    """Of a file, or of the variables ``LMCACHE_*``."""
    make_manager: Callable[[Any], Any]
    """A storage manager with a config."""
    make_key: Callable[[int], Any]
    """Its key of a number."""
    layout: Any
    """Its name of the form that an entry's tensor has."""


class LMCacheConnector(KVConnector):
    """See the module. Looking for blocks and loading them waits for LMCache, also where it asks a server.

    Args:
        settings: ``config_file`` in the extra config, or the variable ``LMCACHE_CONFIG_FILE``, names a file
            of LMCache's settings; else ``LMCACHE_*`` have them.
        load_library: imports LMCache.

    Raises:
        ConfigError: a setting is wrong, or LMCache refuses its own.
        MissingDependency: LMCache cannot be imported.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        load_library: Callable[[], LMCacheLibrary] | None = None,
    ) -> None:
        super().__init__(settings)
        extra = extra_of(settings, CONFIG_FILE, NATIVE)
        if extra.get(NATIVE, True) is not True:
            raise wrong(
                NATIVE, extra[NATIVE], "true, or left out: LMCache has no adapter for headrace"
            )
        path = _path(extra)
        self._library = (load_library or import_lmcache)()
        try:
            self._manager = self._library.make_manager(self._library.read_config(path))
        except Exception as error:
            where = f"{path!r}" if path else "its variables LMCACHE_*"
            raise ConfigError(
                f"LMCache refuses the settings of {where}: {error}",
                field="cache.kv_transfer_config",
            ) from error
        self._is_open = True

    def contains(self, key: bytes) -> bool:
        return self._manager.contains(self._key(key)) is not None

    def load(self, key: bytes, into: memoryview) -> bool:
        with _as_os_error("load"):
            found = self._manager.get(self._key(key))
        if found is None:
            return False
        try:
            data = found.tensor.view(-1).view(torch.uint8)
            good: bool = data.numel() == DIGEST_BYTES + into.nbytes
            if good:
                content = memoryview(data.numpy())
                into[:] = content[DIGEST_BYTES:]
                good = _digest(key, into) == bytes(content[:DIGEST_BYTES])
        finally:
            found.ref_count_down()
        if not good:
            self._manager.remove(self._key(key))
        return good

    def save(self, key: bytes, content: memoryview) -> None:
        if self.contains(key):
            return
        size, own = DIGEST_BYTES + content.nbytes, self._key(key)
        with _as_os_error("save"):
            entry = self._manager.allocate(
                torch.Size([1, 1, 1, size]), torch.uint8, fmt=self._library.layout, busy_loop=False
            )
        if entry is None:
            raise OSError(f"LMCache has no room for a block of {size} bytes")
        data = entry.tensor.view(-1)
        data[:DIGEST_BYTES] = torch.frombuffer(bytearray(_digest(key, content)), dtype=torch.uint8)
        data[DIGEST_BYTES:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with _as_os_error("save"):
            self._manager.batched_put([own], [entry])  # which lets go of the entry

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._manager.close()

    def _key(self, key: bytes) -> Any:
        return self._library.make_key(int.from_bytes(key, "big"))


@contextmanager
def _as_os_error(doing: str) -> Iterator[None]:
    """Errors of LMCache's own classes as OSError, which a connector may raise."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"LMCache: {doing}: {error}") from error


def import_lmcache() -> LMCacheLibrary:
    """Import LMCache.

    Raises:
        MissingDependency: it is not installed, or cannot be loaded.
    """
    try:
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.event_manager import EventManager
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.storage_manager import StorageManager
    except ImportError as error:
        raise MissingDependency(
            error.name or "lmcache",
            needed_for=f"the KV connector lmcache ({error})",
            install="pip install 'headrace-distributed[lmcache]'",
        ) from error

    def read_config(path: str | None) -> Any:
        return LMCacheEngineConfig.from_file(path) if path else LMCacheEngineConfig.from_env()

    def make_manager(config: Any) -> Any:
        # Blocks are bytes to it: one layer, one head.
        described = LMCacheMetadata(
            model_name="headrace", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.uint8, kv_shape=(1, 1, config.chunk_size, 1, 1), role="worker",
        )  # fmt: skip
        return StorageManager(config, described, EventManager())

    return LMCacheLibrary(
        read_config,
        make_manager,
        lambda number: CacheEngineKey("headrace", 1, 0, number, torch.uint8),
        MemoryFormat.KV_2LTD,
    )


def _path(extra: Mapping[str, Any]) -> str | None:
    """Where LMCache's settings are; None: in variables."""
    stated = extra.get(CONFIG_FILE)
    if stated is None:
        return os.environ.get(ENVIRONMENT) or None
    if not isinstance(stated, str) or not Path(stated).is_file():
        raise wrong(CONFIG_FILE, stated, "a file with LMCache's settings")
    return stated


def _digest(key: bytes, content: memoryview) -> bytes:
    digest = blake2b(key, digest_size=DIGEST_BYTES)
    digest.update(content)
    return digest.digest()
