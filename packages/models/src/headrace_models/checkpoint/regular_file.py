"""Opening what is a file of its own accord: a folder may hold pipes and sockets under a file's name."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

_KINDS: Mapping[str, Callable[[int], bool]] = {
    "directory": stat.S_ISDIR,
    "named pipe": stat.S_ISFIFO,
    "socket": stat.S_ISSOCK,
    "device": lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode),
}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading.

    Raises:
        OSError: see :func:`check_regular`; or it cannot be opened.
    """
    check_regular(path)
    return open(path, "rb")


def check_regular(path: Path) -> None:
    """Refuse what is no regular file before anybody opens it: a pipe would have its reader wait for
    whoever writes.

    Raises:
        OSError: it is something else, or there is nothing.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for name, fits in _KINDS.items() if fits(mode)), "special file")
        raise OSError(f"it is a {kind}, must be a regular file")
