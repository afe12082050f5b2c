"""A part of an update on its way from rank 0 to the other ranks, each of which takes its share of it.

On one host all ranks map the same memory, which has no name in any file system: the tensors are there once,
however many ranks there are. To other hosts they go over the ranks' own connections.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_engine.weights.update_set import Part

ALIGNMENT = 256
"""Bytes of which each tensor's place is a multiple."""


@contextmanager
def spread(
    tensors: Iterable[tuple[str, Tensor]], *, shares_memory: bool
) -> Iterator[tuple[Part, Mapping[str, Any]]]:
    """The tensors as rank 0 takes them, and what the other ranks are told of them, which is good for the
    block. What is taken of the tensors may be kept.

    Args:
        tensors: name and tensor, each of which may go once the next one is asked for.
        shares_memory: all ranks are on this host.

    Raises:
        MemoryError: the system has no memory for them.
    """
    if not shares_memory:
        own = list(tensors)
        sent = [(name, _dtype(one), list(one.shape), as_bytes(one)) for name, one in own]
        yield own, {"sent": sent}
        return
    descriptor = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
    try:
        places, size = _write(descriptor, tensors)
        told = {"pid": os.getpid(), "descriptor": descriptor, "size": size, "places": places}
        yield _mapped(descriptor, size, places), told
    finally:
        os.close(descriptor)


def taken(told: Mapping[str, Any]) -> Part:
    """The tensors that rank 0 tells of, as another rank takes them.

    Raises:
        WeightsError: its memory cannot be opened.
    """
    if "sent" in told:
        return [(name, _typed(one, dtype, shape)) for name, dtype, shape, one in told["sent"]]
    path = f"/proc/{told['pid']}/fd/{told['descriptor']}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(
            f"update_weights: memory of rank 0 cannot be opened ({path}): {error.strerror}"
        ) from error
    try:
        return _mapped(descriptor, told["size"], told["places"])
    finally:
        os.close(descriptor)


def as_bytes(tensor: Tensor) -> Tensor:
    """The numbers of a tensor on any device: [n] uint8."""
    own = tensor.detach().to("cpu").contiguous().reshape(-1)
    return own.view(torch.uint8) if own.numel() else torch.empty(0, dtype=torch.uint8)


def _write(descriptor: int, tensors: Iterable[tuple[str, Tensor]]) -> tuple[list[list[Any]], int]:
    """Write tensors one behind the other: name, dtype, shape and first byte of each, and the size of all."""
    places, end = [], 0
    for name, tensor in tensors:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        data = as_bytes(tensor).numpy().data
        end = start
        try:
            while end < start + len(data):
                end += os.pwrite(descriptor, data[end - start :], end)
        except OSError as error:
            raise MemoryError(
                f"tensor {name!r:.200}: {len(data)} bytes of shared memory: {error.strerror}"
            ) from error
        places.append([name, _dtype(tensor), list(tensor.shape), start])
    return places, end


def _mapped(descriptor: int, size: int, places: Iterable[Iterable[Any]]) -> Part:
    """Tensors in memory that is mapped as long as one of them is there. Writing into one changes no other
    rank's."""
    memory = None
    if size:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=access)
    found = []
    for name, dtype, shape, start in places:
        count = torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes
        flat = torch.empty(0, dtype=torch.uint8)
        if count:
            assert memory is not None
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=start)
        found.append((name, _typed(flat, dtype, shape)))
    return found


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _typed(flat: Tensor, dtype: str, shape: Iterable[int]) -> Tensor:
    """A tensor of bytes [n], seen as another one's numbers."""
    kind: torch.dtype = getattr(torch, dtype)
    if not flat.numel():
        return torch.empty([*shape], dtype=kind)
    if flat.data_ptr() % max(1, kind.itemsize):
        flat = flat.clone()
    return flat.view(kind).view([*shape])
