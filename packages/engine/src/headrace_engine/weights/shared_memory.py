"""Tensors in shared memory: a trainer writes them into a segment, and an engine reads them by its name."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_engine.weights.messages import NamedTensors, TensorPlace, by_name
from headrace_engine.weights.plain_tensors import plain

FOLDER = Path("/dev/shm")
"""Where Linux has its segments (``shm_open``)."""
ALIGNMENT = 256
"""Of each tensor's first byte."""


class SharedWeights:
    """A segment that its maker fills with tensors, again and again. A trainer's end.

    The segment belongs to the user who made it, and nobody else may open it (mode 0600).

    >>> with SharedWeights() as shared:
    ...     llm.update_weights(shared.write(model.state_dict()))

    Raises:
        UnsupportedFeature: the system has no such segments.
    """

    def __init__(self) -> None:
        if not FOLDER.is_dir():
            raise UnsupportedFeature(f"shared memory: this system has no {FOLDER}")
        self.name = f"headrace-weights-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file: int | None = os.open(FOLDER / self.name, flags, 0o600)

    def write(self, weights: NamedTensors, **options: Any) -> dict[str, Any]:
        """Write a part over what was there: the argument of ``update_weights`` that has it read.

        Args:
            weights: by the checkpoint's names: a mapping, or pairs.
            options: further fields of that argument (``finish``, ``version``).

        Raises:
            RequestError: a tensor has no plain numbers in memory (:func:`~.plain_tensors.plain`).
            OSError: there is no memory.
        """
        assert self._file is not None, "the segment is closed"
        tensors, end = [], 0
        for name, tensor in by_name(weights):
            own = plain(name, tensor).detach().to("cpu").contiguous()
            start = -(-end // ALIGNMENT) * ALIGNMENT
            _write(self._file, own, start)
            dtype = str(own.dtype).removeprefix("torch.")
            tensors.append(
                {"name": name, "dtype": dtype, "shape": list(own.shape), "offset": start}
            )
            end = start + own.nbytes
        os.ftruncate(self._file, end)
        return {
            "source": "shared_memory",
            "shared_memory": self.name,
            "tensors": tensors,
            **options,
        }

    def close(self) -> None:
        """Give the memory back, once nobody reads it. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(FOLDER / self.name)

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_shared(name: str, tensors: Sequence[TensorPlace]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a segment, one after the other, each in memory of its own: the segment's owner may write
    on, or cut it off, and nothing here fails of that.

    Args:
        name: checked: a name, and no path.

    Raises:
        RequestError: there is no such segment of this user's, or a tensor goes beyond its end.
    """
    file = _opened(name)
    try:
        size = os.fstat(file).st_size
        for tensor in tensors:
            if tensor.offset + tensor.num_bytes > size:
                raise RequestError(
                    f"tensor {tensor.name!r:.200}: {tensor.num_bytes} bytes from {tensor.offset} on go "
                    f"beyond the segment's end ({size})",
                    param="tensors",
                )
        for tensor in tensors:
            yield tensor.name, _read(file, tensor)
    except OSError as error:
        raise RequestError(
            f"shared_memory = {name!r}: cannot be read: {error.strerror}", param="shared_memory"
        ) from error
    finally:
        os.close(file)


def _opened(name: str) -> int:
    """The segment's descriptor. What is none is not opened: opening a FIFO waits, and a device may act.

    Raises:
        RequestError: there is no such segment of this user's.
    """
    path = FOLDER / name
    try:
        _check_segment(name, os.lstat(path))
        # It may be another file by now, so it is asked again; O_NONBLOCK has no FIFO wait.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(
            f"shared_memory = {name!r}: cannot be opened: {error.strerror}", param="shared_memory"
        ) from error
    try:
        _check_segment(name, os.fstat(file))
    except BaseException:
        os.close(file)
        raise
    return file


def _check_segment(name: str, status: os.stat_result) -> None:
    """Raises: RequestError, it is no regular file, or another user's."""
    if not stat.S_ISREG(status.st_mode):
        raise RequestError(
            f"shared_memory = {name!r}: must be a segment; a link, FIFO, folder or device is not opened",
            param="shared_memory",
        )
    if status.st_uid != os.geteuid():
        raise RequestError(
            f"shared_memory = {name!r}: must be a segment of the engine's own user (it is user "
            f"{status.st_uid}'s)",
            param="shared_memory",
        )


def _write(file: int, tensor: Tensor, start: int) -> None:
    view = _bytes(tensor).numpy().data
    done = 0
    while done < len(view):
        done += os.pwrite(file, view[done:], start + done)


def _read(file: int, place: TensorPlace) -> Tensor:
    tensor = torch.empty(place.shape, dtype=getattr(torch, place.dtype))
    view = _bytes(tensor).numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], place.offset + done)
        if not count:
            raise RequestError(
                f"tensor {place.name!r:.200}: the segment was cut off meanwhile", param="tensors"
            )
        done += count
    return tensor


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes."""
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )
