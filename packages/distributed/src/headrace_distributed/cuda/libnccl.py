"""NCCL's library by ctypes: where it is, its functions, and what their return codes say.

Enumerations and signatures are those of nccl.h (NCCL 2, "NCCL API" in NVIDIA's documentation); they have
been the same since 2.10, which brought bfloat16.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError, MissingDependency
from headrace_distributed.errors import GroupError

NAME = "libnccl.so.2"
PATH_VARIABLE = "HEADRACE_NCCL_SO_PATH"
OLDEST = (2, 10, 0)
UNIQUE_ID_BYTES = 128
SUM = 0
"""``ncclSum``."""
DTYPES: Mapping[str, int] = {
    "int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
"""``ncclDataType_t`` by torch's names."""


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``: what the ranks of one communicator know each other by."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


_I, _P, _N = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: Mapping[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_I)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_P), _I, UniqueId, _I],
    "ncclCommDestroy": [_P],
    "ncclCommAbort": [_P],
    "ncclCommGetAsyncError": [_P, ctypes.POINTER(_I)],
    "ncclAllReduce": [_P, _P, _N, _I, _I, _P, _P],
    "ncclReduceScatter": [_P, _P, _N, _I, _I, _P, _P],
    "ncclAllGather": [_P, _P, _N, _I, _P, _P],
    "ncclBroadcast": [_P, _P, _N, _I, _I, _P, _P],
    "ncclSend": [_P, _N, _I, _I, _P, _P],
    "ncclRecv": [_P, _N, _I, _I, _P, _P],
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
}
"""Arguments of the functions that return ``ncclResult_t``."""


class NcclLibrary:
    """NCCL, loaded. Every call's code is checked.

    Args:
        path: of the library; None: :func:`find`.

    Raises:
        MissingDependency: there is none, or it is too old.
        ConfigError: ``HEADRACE_NCCL_SO_PATH`` names a file that is none.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = find() if path is None else path
        try:
            self._library = ctypes.CDLL(self.path)
            self._declare()
        except (OSError, AttributeError) as error:
            raise _missing(f"{self.path}: {error}") from error
        self.version = self._version()
        """(major, minor, patch)."""
        if self.version < OLDEST:
            raise _missing(f"{self.path}: {'.'.join(map(str, self.version))}")

    def _declare(self) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = _I, arguments
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclGetErrorString.argtypes = [_I]
        self._last_error = getattr(self._library, "ncclGetLastError", None)  # from 2.13 on
        if self._last_error is not None:
            self._last_error.restype, self._last_error.argtypes = ctypes.c_char_p, [_P]

    def _version(self) -> tuple[int, int, int]:
        code = _I()
        self.call("ncclGetVersion", ctypes.byref(code))
        # 2.8 and before: major * 1000 + minor * 100 + patch.
        unit = 10_000 if code.value >= 10_000 else 1_000
        major, rest = divmod(code.value, unit)
        return major, rest // 100, rest % 100

    def call(
        self, name: str, *arguments: Any, operation: str = "", comm: int | None = None
    ) -> None:
        """Call a function of NCCL's.

        Args:
            operation: of the communicator, for the message.
            comm: whose last error tells more.

        Raises:
            GroupError: it returned anything but success.
        """
        code = getattr(self._library, name)(*arguments)
        if code:
            raise GroupError(self.explain(name, code, operation, comm))

    def explain(self, name: str, code: int, operation: str = "", comm: int | None = None) -> str:
        """What a code that is not success says, in words."""
        text = self._library.ncclGetErrorString(code).decode()
        more = b"" if self._last_error is None else self._last_error(comm)
        after = f": {more.decode(errors='replace').strip()}" if more else ""
        before = f"{operation}: " if operation else ""
        return f"{before}{name} returned {code} ({text}){after}"

    def unique_id(self) -> bytes:
        """A new communicator's id, of 128 bytes: one rank makes it, and tells the others."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)

    def join(self, unique_id: bytes, rank: int, world_size: int) -> int:
        """Join a communicator with the current device; returns its handle once all ranks have come.

        Raises:
            ValueError: the id is not of 128 bytes.
            GroupError: NCCL could not.
        """
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise ValueError(f"NCCL's id has {len(unique_id)} bytes: must be {UNIQUE_ID_BYTES}")
        comm = _P()
        given = UniqueId.from_buffer_copy(unique_id)
        self.call(
            "ncclCommInitRank", ctypes.byref(comm), world_size, given, rank, operation="joining"
        )
        assert comm.value is not None
        return comm.value

    def async_error(self, comm: int) -> str:
        """What has gone wrong with operations that had begun; "": nothing."""
        code = _I()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(code), comm=comm)
        return self.explain("ncclCommGetAsyncError", code.value, comm=comm) if code.value else ""


def find() -> str:
    """Where NCCL's library is: named by ``HEADRACE_NCCL_SO_PATH``, loaded already (by torch), in the package
    that torch depends on, or where the system's loader looks.

    Raises:
        ConfigError: the variable names no file.
    """
    named = os.environ.get(PATH_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{PATH_VARIABLE} = {named!r}: must be the path of {NAME}")
        return named
    return loaded("libnccl") or _packaged() or NAME


def loaded(name: str) -> str | None:
    """Path of a library that this process has mapped, whose file name begins with ``name``."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line[line.find("/") :] if "/" in line else ""
        if Path(path).name.startswith(name) and ".so" in Path(path).name:
            return path
    return None


def _packaged() -> str | None:
    """In the wheel ``nvidia-nccl-cu*``, which torch's own depends on."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "lib" / NAME
        if path.is_file():
            return str(path)
    return None


def _missing(found: str) -> MissingDependency:
    return MissingDependency(
        f"{NAME} ({found})",
        needed_for="communicator 'pynccl'",
        install=f"pip install nvidia-nccl-cu13, or set {PATH_VARIABLE}; 'nccl' uses torch's own",
    )
