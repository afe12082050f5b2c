"""Torch's library, which the system's linker loads while Python does something else.

A quarter of ``import torch`` is the linker's work on ``libtorch_cpu.so``: it needs no lock of Python's, but
``import`` holds it meanwhile. So a thread asks the linker before; the import then finds the library loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path

_LIBRARIES = (("libtorch_global_deps.so", True), ("libtorch_cpu.so", False))
"""As torch itself loads them, and in its order: name, and True if its symbols are for all libraries."""


def load_torch_library() -> threading.Thread | None:
    """Begin to load the library, in a thread; None: it is loaded, or not to be found here.

    Whoever loads another library meanwhile (imports an extension module) waits for it: the linker does one
    thing at a time.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return None
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib"
    if not all((folder / name).is_file() for name, _ in _LIBRARIES):
        return None
    # No daemon: at the process's end the linker is not to be in the middle of it.
    thread = threading.Thread(target=_load, args=(folder,), name="headrace-torch")
    thread.start()
    return thread


def _load(folder: Path) -> None:
    # Not ctypes.CDLL, which holds Python's lock meanwhile. What fails here fails again in the import.
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for name, is_global in _LIBRARIES:
        kind = os.RTLD_GLOBAL if is_global else os.RTLD_LOCAL
        load(os.fsencode(folder / name), os.RTLD_NOW | kind)
