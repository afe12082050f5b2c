"""A few functions of CUDA's run time, by ctypes: memory that processes share by handles.

torch's own allocations cannot be shared alone: a handle is one of a whole segment of its allocator.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError, MissingDependency
from headrace_distributed.cuda.libnccl import loaded
from headrace_distributed.errors import GroupError

PATH_VARIABLE = "HEADRACE_CUDART_SO_PATH"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
"""``cudaIpcMemLazyEnablePeerAccess``."""


class IpcHandle(ctypes.Structure):
    """``cudaIpcMemHandle_t``."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


_I, _P, _N = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: Mapping[str, list[Any]] = {
    "cudaMalloc": [ctypes.POINTER(_P), _N],
    "cudaFree": [_P],
    "cudaMemset": [_P, _I, _N],
    "cudaDeviceSynchronize": [],
    "cudaIpcGetMemHandle": [ctypes.POINTER(IpcHandle), _P],
    "cudaIpcOpenMemHandle": [ctypes.POINTER(_P), IpcHandle, ctypes.c_uint],
    "cudaIpcCloseMemHandle": [_P],
}


class CudaRuntime:
    """CUDA's run time, for the current device. Every call's code is checked.

    Args:
        path: of the library; None: named by ``HEADRACE_CUDART_SO_PATH``, else the one that torch has loaded.

    Raises:
        MissingDependency: none is loaded.
        ConfigError: the variable names no file.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = _find() if path is None else path
        try:
            self._library = ctypes.CDLL(self.path)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.restype, function.argtypes = _I, arguments
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            self._library.cudaGetErrorString.argtypes = [_I]
        except (OSError, AttributeError) as error:
            raise _missing(f"{self.path}: {error}") from error

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of CUDA's.

        Raises:
            GroupError: it returned anything but success.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.cudaGetErrorString(code).decode()
            raise GroupError(f"{name} returned {code} ({text})")

    def allocate(self, num_bytes: int) -> int:
        """Address of new memory of the current device, all zero."""
        address = _P()
        self.call("cudaMalloc", ctypes.byref(address), num_bytes)
        self.call("cudaMemset", address, 0, num_bytes)
        self.call("cudaDeviceSynchronize")
        assert address.value is not None
        return address.value

    def free(self, address: int) -> None:
        """Give memory back; nobody may have it mapped any more."""
        self.call("cudaFree", address)

    def handle_of(self, address: int) -> bytes:
        """What another process opens an allocation by: 64 bytes."""
        handle = IpcHandle()
        self.call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Address at which the current device sees another process's allocation.

        Raises:
            ValueError: the handle is not of 64 bytes.
            GroupError: the devices cannot reach each other's memory, or the allocation is gone.
        """
        if len(handle) != HANDLE_BYTES:
            raise ValueError(f"a handle of {len(handle)} bytes: must be {HANDLE_BYTES}")
        address = _P()
        given = IpcHandle.from_buffer_copy(handle)
        self.call("cudaIpcOpenMemHandle", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        assert address.value is not None
        return address.value

    def close(self, address: int) -> None:
        """Unmap what :meth:`open` has mapped."""
        self.call("cudaIpcCloseMemHandle", address)


def _find() -> str:
    named = os.environ.get(PATH_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{PATH_VARIABLE} = {named!r}: must be the path of libcudart.so")
        return named
    found = loaded("libcudart")
    if found is None:
        raise _missing("torch has loaded none")
    return found


def _missing(found: str) -> MissingDependency:
    return MissingDependency(
        f"libcudart.so ({found})",
        needed_for="communicator 'custom'",
        install=f"pip install nvidia-cuda-runtime-cu13, or set {PATH_VARIABLE}",
    )
