"""Torch's library, linked by a thread while Python is busy with something else.

Much of ``import torch`` is not Python: the system's linker looks up 140,000 names of ``libtorch_cpu.so``, and
that library registers its operators. ``import torch`` does this under Python's lock, while other cores are
idle. Here it is done before, without the lock (ADR 177).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.assembly.detection import is_for_cpus, torch_folder
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.cores import most_threads

THREAD = "headrace-link"
"""Name of the thread that links."""


@contextmanager
def linking_torch(platform: Platform) -> Iterator[None]:
    """Link torch's library in a thread, beside the block, after which this process imports torch. Without a
    second core, nothing happens.

    Nobody waits at the end of the block: ``import torch`` takes what is linked by then, and waits for the
    rest. Within the block, who imports an extension module waits, and who first uses a native library may
    (:func:`headrace_engine.input_processing.tokenizer.prepare_thread`). If the block raises, the thread has
    ended when the caller hears of it. Why a library cannot be linked, ``import torch`` will say.

    Args:
        platform: of the engine.
    """
    files = libraries(platform)
    if not files or most_threads() < 2:
        yield
        return
    thread = threading.Thread(target=link, args=(files,), name=THREAD)
    thread.start()
    try:
        yield
    except BaseException:
        thread.join()
        raise


def libraries(platform: Platform) -> Sequence[tuple[Path, int]]:
    """Files to be linked, in order, each with ``dlopen``'s flags; none if torch was imported before, on
    another device, and where torch is built for GPUs: it looks for their libraries first.

    They are what ``import torch`` itself opens first: what all libraries of the process are to see
    (``torch._load_global_deps``), then what ``torch._C`` depends on.
    """
    if platform.device != "cpu" or isinstance(platform, BringsWorker) or "torch" in sys.modules:
        return ()
    folder = torch_folder()
    if sys.platform != "linux" or folder is None or not is_for_cpus(folder):
        return ()
    return (
        (folder / "lib" / "libtorch_global_deps.so", os.RTLD_GLOBAL | os.RTLD_NOW),
        # Functions are looked up when they are first called, which most never are.
        (folder / "lib" / "libtorch_cpu.so", os.RTLD_LAZY),
    )


def link(files: Sequence[tuple[Path, int]]) -> None:
    """Open libraries for good, without Python's lock; ends with the first that cannot be opened."""
    try:
        # Called as a function of the C library: ``ctypes.CDLL(file)`` may keep the lock.
        dlopen = ctypes.CDLL(None).dlopen
    except (OSError, AttributeError):
        return
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for file, flags in files:
        if dlopen(os.fsencode(file), flags) is None:
            return
