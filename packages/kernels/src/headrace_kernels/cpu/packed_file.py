"""Packed weights in a file, which the next starts of the same model map instead of packing.

A file holds the weights one after the other, each from a multiple of :data:`ALIGNMENT` on. Beside it is its
seal, which is written last and names the file as the system knows it (device, inode, size, times of change):
a file without a seal of its own is none, and so is one that was changed since. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import WeightsError
from headrace_kernels.cpu import library
from headrace_kernels.mapped.shared_file import SharedFile

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the file's form. That of the weights is the native library's, and part of the file's name."""
ALIGNMENT = 4096
WEIGHTS, SEAL, PART = ".weights", ".json", ".part"
MAX_SEAL_BYTES = 4 << 20
_SPARE = 1 << 30
"""Bytes of the disk that a file leaves free."""
_FORGOTTEN = 86_400.0
"""Seconds after which a part of a file is nobody's: its writer was ended."""
_BUFFER = 4 << 20
"""Bytes of one write: two large pages, as which the system keeps them in its cache, if it does."""

Sizes = Mapping[str, int]
"""Bytes of each weight, by name, in the file's order."""


class Place(NamedTuple):
    """Bytes of one weight in a file."""

    offset: int
    size: int


class PackedFile:
    """The packed weights of one subject in a folder of such files, of which the ones used last are kept.

    A folder that cannot be read or written is as if it were empty, and so is a file that is not what its
    seal says: weights are packed then.

    Args:
        folder: made when something is written.
        subject: what was packed, as JSON has it: the checkpoint's files, and which tensors became which
            weight. The native library and the instruction set are added.
        most_bytes: of all files of the folder.
    """

    def __init__(self, folder: Path, subject: Mapping[str, Any], most_bytes: int) -> None:
        self.folder, self.most_bytes, self._subject = folder, most_bytes, subject

    @functools.cached_property
    def _stem(self) -> Path:
        content = [VERSION, *_native(), self._subject]
        text = json.dumps(content, sort_keys=True, default=str)
        return self.folder / hashlib.sha256(text.encode()).hexdigest()

    def find(self, sizes: Sizes) -> SharedFile | None:
        """The file, mapped, if it holds weights of these sizes and nobody can change it under us."""
        seal = self._stem.with_suffix(SEAL)
        try:
            descriptor = os.open(self._stem.with_suffix(WEIGHTS), os.O_RDONLY | _NO_LINK)
        except OSError as error:
            logger.info("no packed weights are kept: %s", error.strerror)
            return None
        try:
            _check_seal(seal, descriptor, sizes)
            shared = SharedFile.of(descriptor)
            if not shared.is_leased:
                raise ValueError(
                    "the system gives no lease on it: who changes it would not be waited for"
                )
            shared.populate()
            _check_seal(seal, descriptor, sizes)  # from here on nobody changes it
        except (OSError, ValueError, RecursionError) as error:
            logger.info("%s is not used: %s", self._stem.with_suffix(WEIGHTS), error)
            return None
        finally:
            os.close(descriptor)
        with suppress(OSError):
            os.utime(seal)  # it has been used
        return shared

    def is_missing(self, sizes: Sizes) -> bool:
        """True if there is no such file, or not a whole one."""
        try:
            descriptor = os.open(self._stem.with_suffix(WEIGHTS), os.O_RDONLY | _NO_LINK)
        except OSError:
            return True
        try:
            _check_seal(self._stem.with_suffix(SEAL), descriptor, sizes)
        except (OSError, ValueError, RecursionError):
            return True
        finally:
            os.close(descriptor)
        return False

    def write(
        self, sizes: Sizes, weights: Iterable[memoryview], is_ended: Callable[[], bool]
    ) -> bool:
        """Write the file, whole or not at all; older files make room. True: it is there.

        Args:
            weights: each one's bytes, in order; made as they are asked for.
            is_ended: asked now and then; True ends the writing.
        """
        total = total_bytes(sizes)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(total)
            return self._write(sizes, total, weights, is_ended)
        except (OSError, ValueError, WeightsError) as error:
            logger.info("packed weights are not kept for the next start: %s", error)
            return False

    def _write(
        self, sizes: Sizes, total: int, weights: Iterable[memoryview], is_ended: Callable[[], bool]
    ) -> bool:
        handle, part = tempfile.mkstemp(dir=self.folder, suffix=PART)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, total)  # a full disk says so now
            writer, sums = _AlignedWriter(handle), list[int]()
            for weight in weights:
                if is_ended():
                    return False
                sums.append(zlib.crc32(weight))
                writer.add(weight)
            if is_ended():
                return False
            writer.finish()
            os.fsync(handle)
            _check_written(part, handle, sizes, sums)
            os.fchmod(handle, 0o400)
            os.replace(part, self._stem.with_suffix(WEIGHTS))
            self._seal(handle, sizes)
            return True
        finally:
            os.close(handle)
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _seal(self, handle: int, sizes: Sizes) -> None:
        content = {"version": VERSION, "file": _identity(handle), "sizes": dict(sizes)}
        descriptor, part = tempfile.mkstemp(dir=self.folder, suffix=PART)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump(content, file)
            os.replace(part, self._stem.with_suffix(SEAL))
        finally:
            with suppress(FileNotFoundError):
                os.unlink(part)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what was used longest ago, until this file fits besides.

        Raises:
            ValueError: it does not fit.
        """
        if num_bytes > self.most_bytes:
            raise ValueError(
                f"they take {num_bytes} bytes, at most {self.most_bytes} are allowed "
                "(--packed-weights-cache-gb)"
            )
        for part in self.folder.glob("*" + PART):
            if time.time() - _modified(part) > _FORGOTTEN:
                part.unlink(missing_ok=True)
        others = [file for file in self.folder.glob("*" + WEIGHTS) if file.stem != self._stem.name]
        held = {file: _size(file) for file in others}
        for file in sorted(others, key=_used):
            if num_bytes + sum(held.values()) <= self.most_bytes:
                break
            del held[file]
            file.unlink(missing_ok=True)
            file.with_suffix(SEAL).unlink(missing_ok=True)
        found = os.statvfs(self.folder)
        free = found.f_bavail * found.f_frsize
        if num_bytes + _SPARE > free:
            raise ValueError(
                f"they take {num_bytes} bytes, {free} are free on the disk, of which {_SPARE} stay free"
            )


def places(sizes: Sizes) -> dict[str, Place]:
    """Where each weight is in a file."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = Place(at, size)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return found


def total_bytes(sizes: Sizes) -> int:
    """Bytes of a file."""
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())


_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def _native() -> Iterator[object]:
    """Facts that decide on the layout of a packed weight."""
    yield library.isa()
    found = library.path()
    if found is not None:
        stat = found.stat()
        yield [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _identity(descriptor: int) -> list[int]:
    found = os.fstat(descriptor)
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _check_seal(seal: Path, descriptor: int, sizes: Sizes) -> None:
    """Raises: OSError, ValueError: the file is not that which was written, or of other weights."""
    with seal.open("rb") as file:
        content = file.read(MAX_SEAL_BYTES + 1)
    if len(content) > MAX_SEAL_BYTES:
        raise ValueError(f"{seal.name} has more than {MAX_SEAL_BYTES} bytes")
    fields = json.loads(content)
    if not isinstance(fields, dict) or fields.get("version") != VERSION:
        raise ValueError(f"{seal.name} is of another version")
    if fields.get("file") != _identity(descriptor):
        raise ValueError("it has changed since it was written")
    found = fields.get("sizes")
    if not isinstance(found, dict) or [*found.items()] != [*sizes.items()]:
        raise ValueError("it holds other weights")
    if os.fstat(descriptor).st_size != total_bytes(sizes):
        raise ValueError("it is of another size than its weights")


class _AlignedWriter:
    """Writes a file in pieces of :data:`_BUFFER` from multiples of it on, whatever the weights' sizes: the
    system keeps each in large pages of its cache, where it has such."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._waiting: list[memoryview] = []
        self._count = 0

    def add(self, weight: memoryview) -> None:
        """One weight's bytes, which must stay until more have come, or the end."""
        padding = memoryview(bytes(-len(weight) % ALIGNMENT))
        self._waiting += [weight, padding]
        self._count += len(weight) + len(padding)
        while self._count >= _BUFFER:
            self._write(_BUFFER)

    def finish(self) -> None:
        while self._count:
            self._write(min(self._count, _BUFFER))

    def _write(self, size: int) -> None:
        taken, missing = list[memoryview](), size
        while missing:
            first = self._waiting.pop(0)
            if len(first) > missing:
                self._waiting.insert(0, first[missing:])
                first = first[:missing]
            taken.append(first)
            missing -= len(first)
        self._count -= size
        written = os.writev(self._handle, taken)
        if written < size:  # the rest, by the error that it meets
            rest = b"".join(taken)[written:]
            while rest:
                rest = rest[os.write(self._handle, rest) :]


def _check_written(part: str, handle: int, sizes: Sizes, sums: list[int]) -> None:
    """Raises: OSError: the disk has other bytes than were written."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    descriptor = os.open(part, os.O_RDONLY | _NO_LINK)
    try:
        shared = SharedFile.of(descriptor)
    finally:
        os.close(descriptor)
    shared.populate()
    with memoryview(shared) as content:
        for (offset, size), wanted in zip(places(sizes).values(), sums, strict=True):
            if zlib.crc32(content[offset : offset + size]) != wanted:
                raise OSError(f"{part}: the disk gives back other bytes than were written")


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _used(file: Path) -> float:
    """When a file was used last, by its seal's time; one without a seal goes first."""
    try:
        return file.with_suffix(SEAL).stat().st_mtime
    except FileNotFoundError:
        return 0.0
