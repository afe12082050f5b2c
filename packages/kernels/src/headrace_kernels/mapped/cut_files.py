"""Files that are cut while they are mapped: an error that names the file, in place of SIGBUS, which ends the
process without a word."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace_core.errors import WeightsError

LIBRARY = Path(__file__).with_name("headrace_cut_files.so")
_LONGEST_PATH = 4096


@contextmanager
def cut_files_raise() -> Iterator[None]:
    """While it is open, pages that a mapped file has lost read as zeros, in all threads; at its end that is
    an error. Meant for the loading of weights, not for steps: signals are the whole process's, so two loads
    at the same time are told of each other's files.

    Without the native library, as where no compiler was at hand, and on other systems than Linux, nothing is
    watched.

    Raises:
        WeightsError: a file was cut; names it. It takes the place of an error that the zeros led to.
    """
    library = _opened()
    seen = -1 if library is None else library.hr_watch_begin()
    if library is None or seen < 0:
        yield
        return
    path = ctypes.create_string_buffer(_LONGEST_PATH)
    ended = False
    try:
        yield
    except Exception as error:
        ended, now = True, library.hr_watch_end(path, _LONGEST_PATH)
        if now > seen:
            raise _cut(path.value) from error
        raise
    finally:
        now = seen if ended else library.hr_watch_end(path, _LONGEST_PATH)
    if now > seen:
        raise _cut(path.value)


def _cut(path: bytes) -> WeightsError:
    return WeightsError(
        f"{os.fsdecode(path)}: was cut while it was read: whoever writes it must write another file and "
        "rename it; start again once it is whole"
    )


def _opened() -> ctypes.CDLL | None:
    """None: it was not built, or is of other sources."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.hr_watch_begin.restype = library.hr_watch_end.restype = ctypes.c_int64
        library.hr_watch_end.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    except (OSError, AttributeError):
        return None
    return library
