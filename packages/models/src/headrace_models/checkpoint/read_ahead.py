"""Reading a checkpoint from disk while other things start. No torch."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_models.checkpoint.regular_file import open_regular
from headrace_models.formats.contents import weight_files

logger = logging.getLogger(__name__)


def read_ahead(
    path: Path, *, weight_bytes: int, available: int, load: LoadConfig | None = None
) -> threading.Thread | None:
    """Ask the system to read the weight files of ``path`` into its file cache, from a thread. It reads
    all of them at once, as fast as several readers would.

    By the time that torch is imported a good part of the weights is in memory; where they all are
    already, it costs nothing. Errors are left to the loader, which reports them.

    Args:
        weight_bytes: size of the weights.
        available: bytes of memory that could be used now. Weights that would take more than half
            of it are left alone: they would push out what they were read for.

    Returns:
        The thread, None if there is nothing to do.
    """
    if not hasattr(os, "posix_fadvise") or not 0 < weight_bytes <= available // 2:
        return None
    try:
        files = weight_files(path, load or LoadConfig())
    except WeightsError:
        return None
    if not files:
        return None
    thread = threading.Thread(target=_read, args=(files,), name="headrace-read-ahead", daemon=True)
    thread.start()
    return thread


def _read(files: tuple[Path, ...]) -> None:
    for path in files:
        try:
            with open_regular(path) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:
            logger.debug("%s: not read ahead: %s", path, error)
