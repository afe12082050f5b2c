"""Errors of writing that say which file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Reasons for which the system takes no more of a file that is open already."""


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError of the body the file's name, which the system leaves out where a file is open
    already: for a full disk, say."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
