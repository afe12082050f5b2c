"""Blocks as files in a folder, one for each: bounded, checksummed, written under another name and renamed.

A file is ``"HRKVB001" | u64 number of bytes | digest | content``, little-endian; the digest is BLAKE2b-256
(RFC 7693) over the key, the number and the content. So a file that was cut off, damaged, or swapped with
another is told from a good one; nothing of it is unpickled. Its name is the key's hex digits, in a folder by
the first two.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import threading
from collections import OrderedDict
from hashlib import blake2b
from pathlib import Path

MAGIC = b"HRKVB001"
DIGEST_BYTES = 32
_SIZE = struct.Struct("<Q")
HEADER_BYTES = len(MAGIC) + _SIZE.size + DIGEST_BYTES
SUFFIX = ".kv"


class BlockFolder:
    """Threads may use one at the same time.

    Args:
        root: is there, and can be used.
        max_bytes: of all files; those that were used longest ago go first. None: no bound, and other
            processes may write to the folder, too.
    """

    def __init__(self, root: Path, max_bytes: int | None = None) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Of a bounded folder: bytes of its files, in the order of use."""
        self.num_bytes = 0
        self._held: int | None = None
        """Descriptor of a bounded folder, which holds a lock on it until it is closed."""
        self.is_alone = True
        """False: another bounded folder was open at this root, so that the files of both have no bound."""
        if max_bytes is not None:
            self._held = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.is_alone = False
            except OSError:  # a file system without locks of folders
                pass
            self._look()

    def contains(self, key: bytes) -> bool:
        """True if there is a file for a key; it counts as used."""
        if self._max_bytes is None:
            return self._path(key).exists()
        with self._lock:
            if key not in self._sizes:
                return False
            self._sizes.move_to_end(key)
            return True

    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a block; False: there is none, or its file is not what was written, which is removed.

        Raises:
            OSError: it cannot be read.
        """
        path = self._path(key)
        try:
            with open(path, "rb") as file:
                header = file.read(HEADER_BYTES)
                good = header[:-DIGEST_BYTES] == MAGIC + _SIZE.pack(into.nbytes)
                good = good and file.readinto(into) == into.nbytes and not file.read(1)
        except FileNotFoundError:
            self._drop(key)
            return False
        if not good or header[-DIGEST_BYTES:] != _digest(key, into):
            self.discard(key)
            return False
        with contextlib.suppress(OSError):  # a reader may not be allowed to
            os.utime(path)
        return True

    def save(self, key: bytes, content: memoryview) -> None:
        """Write a block, if there is none.

        Raises:
            OSError: it cannot be written.
        """
        if self.contains(key):
            return
        size = HEADER_BYTES + content.nbytes
        if self._max_bytes is not None and size > self._max_bytes:
            raise OSError(f"a block of {size} bytes; the folder holds {self._max_bytes}")
        self._make_room(size)
        path = self._path(key)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + _SIZE.pack(content.nbytes) + _digest(key, content))
                file.write(content)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        self._add(key, size)

    def discard(self, key: bytes) -> None:
        """Remove a block's file, if there is one."""
        self._drop(key)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def close(self) -> None:
        """Let another one have the folder. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._root / name[:2] / (name + SUFFIX)

    def _look(self) -> None:
        """Find the files that are there, in the order of their use."""
        found = []
        for path in self._root.glob(f"[0-9a-f][0-9a-f]/*{SUFFIX}"):
            with contextlib.suppress(ValueError, OSError):
                key, stat = bytes.fromhex(path.name.removesuffix(SUFFIX)), path.stat()
                found.append((stat.st_mtime, key, stat.st_size))
        for _, key, size in sorted(found):
            self._add(key, size)
        self._make_room(0)

    def _add(self, key: bytes, size: int) -> None:
        if self._max_bytes is None:
            return
        with self._lock:
            self.num_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size

    def _drop(self, key: bytes) -> None:
        with self._lock:
            self.num_bytes -= self._sizes.pop(key, 0)

    def _make_room(self, num_bytes: int) -> None:
        while self._max_bytes is not None and self.num_bytes + num_bytes > self._max_bytes:
            with self._lock:
                oldest = next(iter(self._sizes))
            self.discard(oldest)


def _digest(key: bytes, content: memoryview) -> bytes:
    digest = blake2b(key + _SIZE.pack(content.nbytes), digest_size=DIGEST_BYTES)
    digest.update(content)
    return digest.digest()
