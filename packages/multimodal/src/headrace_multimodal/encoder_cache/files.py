"""Vectors in a folder that producers and consumers share: one safetensors file in a folder for each item."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.arrays import PackedArray
from headrace_core.errors import ConfigError
from headrace_core.multimodal import ECConnector
from headrace_multimodal.encoder_cache.vectors_file import check_key, from_file, to_file

FILE = "encoder_cache.safetensors"
FIELD = "multimodal.ec_transfer_config"
EXTRA = f"{FIELD}.ec_connector_extra_config"
PATH = "shared_storage_path"
LOOK_EVERY = 64


class _Kept(NamedTuple):
    """An item in the folder."""

    used: float
    num_bytes: int
    folder: Path


class FileConnector(ECConnector):
    """Producers write under another name and rename, so that nobody reads half a file. They remove the items
    that were used longest ago where all would take more than ``ec_buffer_size``.

    Raises:
        ConfigError: ``shared_storage_path`` is missing, or no folder that can be used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        for name in ("ec_ip", "ec_port"):
            if name in settings:
                raise ConfigError(
                    f"{FIELD}.{name} = {settings[name]!r}: must be left out: a folder has no address",
                    field=f"{FIELD}.{name}",
                )
        extra = settings["ec_connector_extra_config"]
        unknown = sorted(set(extra) - {PATH})
        if unknown:
            raise _wrong(unknown[0], extra[unknown[0]], f"left out: there is only {PATH}")
        stated = extra.get(PATH)
        if not isinstance(stated, str) or not stated:
            raise _wrong(PATH, stated, "a folder that producers and consumers share")
        self._root, self._max_bytes = Path(stated), int(settings["ec_buffer_size"])
        self._reckoned = self._unlooked = 0
        self._try_folder(writes=settings["ec_role"] == "ec_producer")

    def _try_folder(self, *, writes: bool) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if writes:
                tempfile.TemporaryFile(dir=self._root).close()
            os.listdir(self._root)
        except OSError as error:
            raise _wrong(PATH, str(self._root), f"a folder to use: {error.strerror}") from error

    def save(self, key: str, vectors: PackedArray) -> None:
        folder = self._root / check_key(key)
        if (folder / FILE).exists():
            _touch(folder / FILE)
            return
        data = to_file(vectors)
        if len(data) > self._max_bytes:
            raise OSError(f"vectors of {len(data)} bytes; ec_buffer_size is {self._max_bytes}")
        self._make_room(len(data))
        descriptor, name = tempfile.mkstemp(dir=self._root, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            folder.mkdir(exist_ok=True)
            os.replace(name, folder / FILE)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def load(self, key: str) -> PackedArray | None:
        path = self._root / check_key(key) / FILE
        try:
            if path.stat().st_size > self._max_bytes:
                raise OSError(f"{path}: longer than ec_buffer_size = {self._max_bytes}")
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        _touch(path)
        return from_file(data)

    def _make_room(self, num_bytes: int) -> None:
        """Remove items until so many bytes have room. What others have added is seen by looking, which takes
        its time in a large folder: after :data:`LOOK_EVERY` items, and where there seems to be no room."""
        self._unlooked -= 1
        if self._unlooked < 0 or self._reckoned + num_bytes > self._max_bytes:
            self._reckoned, self._unlooked = self._freed(num_bytes), LOOK_EVERY
        self._reckoned += num_bytes

    def _freed(self, num_bytes: int) -> int:
        """Bytes that are left in the folder once so many have room."""
        kept = sorted(self._items())
        total = sum(item.num_bytes for item in kept)
        for item in kept:
            if total + num_bytes <= self._max_bytes:
                break
            shutil.rmtree(item.folder, ignore_errors=True)
            total -= item.num_bytes
        return total

    def _items(self) -> Iterator[_Kept]:
        for folder in filter(is_key, self._root.iterdir()):
            with contextlib.suppress(OSError):  # another producer may remove it now
                found = (folder / FILE).stat()
                yield _Kept(found.st_mtime, found.st_size, folder)


def is_key(path: Path) -> bool:
    """True if a folder's name is a key: nothing else is ever removed."""
    try:
        return bool(check_key(path.name))
    except ValueError:
        return False


def _touch(path: Path) -> None:
    """Note that a file was used; a consumer may not be allowed to."""
    with contextlib.suppress(OSError):
        os.utime(path)


def _wrong(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{EXTRA}.{name} = {value!r}: must be {accepted}", field=f"{EXTRA}.{name}")
