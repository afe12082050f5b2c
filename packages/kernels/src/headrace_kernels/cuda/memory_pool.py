"""Memory of CUDA devices that sleeps: see :class:`headrace_engine.sleep.memory_pool.MemoryPool`.

torch's caching allocator takes memory for tensors of a pool from our library (``native/src/cuda``), which
maps physical pages to addresses that it has reserved (CUDA Driver API, "Virtual Memory Management").
Asleep, pages are unmapped and released, and addresses stay reserved.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from headrace_core.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    MissingDependency,
    UnsupportedFeature,
)

LIBRARY = Path(__file__).with_name("headrace_cuda_memory.so")
DRIVER = "libcuda.so.1"
_ALLOCATED, _RESIDENT, _KEPT = 0, 1, 2
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_COUNTER = itertools.count()


class CudaMemoryPool:
    """See :class:`headrace_engine.sleep.memory_pool.MemoryPool`. Tags of one pool are not those of another.

    Args:
        driver: file name of CUDA's driver.
        region: a tag -> what sends torch's allocations of this thread to the library; default: a memory
            pool of torch's for each tag.

    Raises:
        MissingDependency: the library was not built.
        UnsupportedFeature: there is no driver, or it is too old.
        ConfigError: torch's allocator is set to map memory itself.
    """

    def __init__(
        self,
        driver: str = DRIVER,
        region: Callable[[str], AbstractContextManager[Any]] | None = None,
    ) -> None:
        _check_settings()
        self._library = _open(driver)
        self._prefix = f"{next(_COUNTER)}:"
        self._region = region or _TorchPools()

    @contextmanager
    def use(self, tag: str) -> Iterator[None]:
        """See :meth:`headrace_engine.sleep.memory_pool.MemoryPool.use`. Not to be nested."""
        self._library.headrace_pool_tag(self._name(tag))
        try:
            with self._region(tag):
                yield
        finally:
            self._library.headrace_pool_tag(b"default")

    def sleep(self, tags: Iterable[str], kept: Collection[str] = ()) -> None:
        """See :meth:`headrace_engine.sleep.memory_pool.MemoryPool.sleep`."""
        for tag in tags:
            status = self._library.headrace_pool_sleep(self._name(tag), int(tag in kept))
            self._check(
                status, f"sleep: the host's memory cannot hold what {tag!r} has on the device"
            )

    def wake(self, tags: Iterable[str]) -> None:
        """See :meth:`headrace_engine.sleep.memory_pool.MemoryPool.wake`."""
        for tag in tags:
            status = self._library.headrace_pool_wake(self._name(tag))
            missing = self._bytes(tag, _ALLOCATED) - self._bytes(tag, _RESIDENT)
            self._check(
                status,
                f"wake: the device has no memory for the {missing / 2**20:.1f} MiB that {tag!r} lacks: end "
                "what else runs on it, and wake again",
            )

    def num_bytes(self, tag: str) -> int:
        """See :meth:`headrace_engine.sleep.memory_pool.MemoryPool.num_bytes`."""
        return self._bytes(tag, _RESIDENT)

    def num_kept_bytes(self, tag: str) -> int:
        """Bytes of a tag's content that the host keeps."""
        return self._bytes(tag, _KEPT)

    def _name(self, tag: str) -> bytes:
        return (self._prefix + tag).encode()

    def _bytes(self, tag: str, which: int) -> int:
        return int(self._library.headrace_pool_bytes(self._name(tag), which))

    def _check(self, status: int, out_of_memory: str) -> None:
        if not status:
            return
        reason = self._library.headrace_pool_error().decode()
        if status == _OUT_OF_MEMORY:
            raise CapacityError(f"{out_of_memory} ({reason})")
        raise EngineError(f"CUDA's memory pool: {reason}")


class _TorchPools:
    """A memory pool of torch's for each tag, filled by the library."""

    def __init__(self) -> None:
        from torch.cuda.memory import CUDAPluggableAllocator

        self._allocator = CUDAPluggableAllocator(
            str(LIBRARY), "headrace_pool_malloc", "headrace_pool_free"
        )
        self._pools: dict[str, Any] = {}

    def __call__(self, tag: str) -> AbstractContextManager[Any]:
        import torch

        if tag not in self._pools:
            self._pools[tag] = torch.cuda.MemPool(self._allocator.allocator())  # type: ignore[no-untyped-call]
        found: AbstractContextManager[Any] = torch.cuda.use_mem_pool(self._pools[tag])
        return found


def _check_settings() -> None:
    for name in _SETTINGS:
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.lower().replace(" ", ""):
            raise ConfigError(
                f"{name} = {value!r}: must be without expandable_segments:True for memory that sleeps, "
                "whose addresses the pool maps itself",
                field="device.enable_sleep_mode",
            )


def _open(driver: str) -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise MissingDependency(
            LIBRARY.name,
            needed_for="sleep on CUDA devices",
            install="pip install --force-reinstall --no-binary headrace-kernels headrace-kernels",
        )
    library = ctypes.CDLL(str(LIBRARY))
    for name in ("tag", "open", "sleep", "wake", "bytes"):
        getattr(library, f"headrace_pool_{name}").argtypes = [ctypes.c_char_p]
    library.headrace_pool_sleep.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.headrace_pool_bytes.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.headrace_pool_bytes.restype = ctypes.c_longlong
    library.headrace_pool_error.restype = ctypes.c_char_p
    library.headrace_pool_tag.restype = None
    if library.headrace_pool_open(driver.encode()):
        reason = library.headrace_pool_error().decode()
        raise UnsupportedFeature(
            f"device.enable_sleep_mode: CUDA's driver {driver!r} cannot be used: {reason}",
            param="device.enable_sleep_mode",
        )
    return library
