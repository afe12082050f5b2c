"""The native library: where it is, and its functions.

Imports no torch. ctypes releases the GIL during a call, so a thread that waits for another rank keeps
nobody else.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import MissingDependency
from headrace_distributed.errors import GroupError

INTERFACE = 2
"""Of ``hr_shm_interface`` in native/src/ring.cpp."""

OK, DIED, LEFT, FAILED, TIMED_OUT, MISMATCH = range(6)
"""What a call returns: native/src/waiting.h."""

DTYPES: Mapping[str, int] = {
    "float32": 0, "bfloat16": 1, "float16": 2, "float64": 3, "int32": 4, "int64": 5,
}  # fmt: skip
"""Codes of the types that can be added up."""

_P, _L, _I, _U = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint64
_SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "hr_shm_interface": (_I, []),
    "hr_group_bytes": (_L, [_I, _L]),
    "hr_group_most_ranks": (_I, []),
    "hr_group_open": (_P, [_I] * 3 + [_L] * 4),
    "hr_group_close": (None, [_P]),
    "hr_group_culprit": (_I, [_P]),
    "hr_group_call_of": (_U, [_P, _I]),
    "hr_group_join": (_I, [_P]),
    "hr_group_barrier": (_I, [_P]),
    "hr_group_all_reduce": (_I, [_P, _P, _L, _I]),
    "hr_group_reduce_scatter": (_I, [_P, _P, _P, _L, _I]),
    "hr_group_all_gather": (_I, [_P, _P, _P, _L, _L]),
    "hr_group_broadcast": (_I, [_P, _P, _L, _I]),
    "hr_ring_bytes": (_L, [_I, _L]),
    "hr_ring_open": (_P, [_I, _I, _I, _L, _L]),
    "hr_ring_send": (_I, [_P, _P, _L, _L]),
    "hr_ring_join": (_I, [_P, _L]),
    "hr_ring_look": (_I, [_P]),
    "hr_ring_next": (_I, [_P, _P, _L]),
    "hr_ring_take": (_I, [_P, _P, _L, _L]),
    "hr_ring_culprit": (_I, [_P]),
    "hr_ring_close_writer": (None, [_P]),
    "hr_ring_close_reader": (None, [_P]),
}


class NativeCall(NamedTuple):
    """A function as a recorded step needs it (:class:`headrace_core.graph.RecordsCalls`)."""

    name: str
    arguments: tuple[Any, ...]
    """ctypes of the arguments."""
    packed: int
    """Address of the form that takes them from an array of 64-bit words."""


def path() -> Path:
    """Where the library is, if it was built."""
    return Path(__file__).with_name("headrace_shm.so")


def available() -> bool:
    """True if ranks of this host can share memory: on Linux, with the library built."""
    return path().exists()


@functools.cache
def load() -> ctypes.CDLL:
    """The library, its functions typed.

    Raises:
        MissingDependency: it was not built, or of other sources; says how to build it.
    """
    if not available():
        raise _missing(None)
    library = ctypes.CDLL(str(path()), use_errno=True)
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise _missing(f"{path()}: {error}") from error
    found = library.hr_shm_interface()
    if found != INTERFACE:
        raise _missing(f"{path()}: interface {found}, not {INTERFACE}")
    return library


@functools.cache
def recorded(name: str) -> NativeCall:
    """A collective operation as a recorded step calls it."""
    packed = ctypes.cast(getattr(load(), f"{name}_packed"), ctypes.c_void_p).value
    assert packed is not None
    return NativeCall(name.removeprefix("hr_group_"), tuple(_SIGNATURES[name][1]), packed)


def why_not_opened(who: str) -> GroupError:
    """The error of an end that the library has just not opened."""
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        return GroupError(f"{who} was opened before: each is one process's")
    return GroupError(f"{who}: shared memory could not be mapped: {os.strerror(number)}")


def _missing(found: str | None) -> MissingDependency:
    native = Path(__file__).parents[3] / "native"
    install = "pip install --force-reinstall --no-binary headrace-distributed headrace-distributed"
    if (native / "CMakeLists.txt").exists():
        install = (
            f"cmake -S {native} -B {native}/build -DCMAKE_BUILD_TYPE=Release && "
            f"cmake --build {native}/build"
        )
    return MissingDependency(
        "headrace_shm", needed_for="communicator 'shm'", install=install, found=found
    )
