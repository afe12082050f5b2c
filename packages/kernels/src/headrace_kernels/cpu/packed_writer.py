"""Writing packed weights for the next start, once this one is over: a thread that packs them again, one by
one, out of the checkpoint. Nothing of the running model is read, so that its weights may change meanwhile."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_kernels.cpu.packed_file import PackedFile
from headrace_kernels.cpu.packing_ahead import PackingAhead, PackJob, WeightPacker, large_enough
from headrace_kernels.mapped.cut_files import cut_files_raise

logger = logging.getLogger(__name__)

_NICE = 19
"""Its priority: what requests leave."""


class PackedWriter:
    """Writes the file of packed weights if there is none, and has mapped ones copied into large pages where
    they are in small ones.

    The process ends when the file has been written, unless :meth:`close` is called: a script that runs for
    three seconds is to leave something, too.

    Args:
        file: to be written.
        make_jobs: the weights; asked in the thread.
        is_current: True if the checkpoint still is what the file is to be of; asked when all was read.
        ahead: this start's, whose weights may be mapped; None: there are none.
    """

    def __init__(
        self,
        file: PackedFile,
        make_jobs: Callable[[], Sequence[PackJob]],
        is_current: Callable[[], bool],
        ahead: PackingAhead | None = None,
    ) -> None:
        self._file, self._make_jobs, self._ahead = file, make_jobs, ahead
        self._is_current = is_current
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-keep", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End it, and leave no part of a file."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def wait(self) -> None:
        """Wait until it has written what it has to."""
        self._thread.join()

    def _run(self) -> None:
        if hasattr(os, "setpriority"):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of the thread
        try:
            if self._ahead is not None:
                self._ahead.settle()
            self._write()
        except (WeightsError, ConfigError, MissingDependency, OSError, MemoryError) as error:
            logger.info("packed weights are not kept for the next start: %s", error)

    def _write(self) -> None:
        jobs = large_enough(self._make_jobs())
        if not jobs:
            return
        packer, begin = WeightPacker(jobs), time.monotonic()
        sizes = packer.sizes
        if not self._file.is_missing(sizes):
            return
        if self._file.write(sizes, self._contents(packer), self._closing.is_set):
            size, seconds = sum(sizes.values()) / 2**20, time.monotonic() - begin
            logger.info(
                "%d packed weights, %.1f MiB, are kept for the next start: %.1f s",
                len(sizes),
                size,
                seconds,
            )

    def _contents(self, packer: WeightPacker) -> Iterator[memoryview]:
        """Each weight's bytes.

        Raises:
            WeightsError: the checkpoint was cut, or has changed. Then none of them is to be used.
        """
        with cut_files_raise():
            for job, region in packer.packed(self._closing.is_set, one_by_one=True):
                yield memoryview(region.mapping)[region.start : region.start + packer.size(job)]
        if not self._is_current():
            raise WeightsError("the checkpoint has changed while it was packed")
