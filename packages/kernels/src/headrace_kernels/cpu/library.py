"""The shared library: where it is, what it can do on this machine, and its functions by name.

Imports no torch. Pointers cross as integers (``Tensor.data_ptr()``), strides and sizes as 64-bit
integers counted in elements unless the kernel's comment says bytes; ctypes releases the GIL
during a call. Kernels are compiled once per instruction set; a :class:`Library` holds those of one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError, MissingDependency

ISA_VARIABLE = "HEADRACE_CPU_ISA"
"""Environment variable that forces an instruction set: a name of :func:`levels`."""

ISA_LEVELS = ("avx512_amx", "avx512_bf16", "avx512", "avx2", "portable")
"""Every level that a library can have, best first."""

VNNI_ISAS = ("avx512_amx", "avx512_bf16")
"""Instruction sets that multiply pairs, and so read VNNI-packed caches (:mod:`headrace_core.ops.vnni`)."""

DTYPES: Mapping[str, int] = {"float32": 0, "bfloat16": 1, "float16": 2}
"""Codes of dtypes in the C interface."""

BAD_LENGTHS = 2
"""A kernel's status: row counts contradict each other. 0 is success, 1 an index out of range."""

BAD_VALUES = 3
"""A kernel's status: values that must be finite are not."""

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_D = ctypes.c_double
_SIGNATURES: Mapping[str, tuple[Any, list[Any]]] = {
    "embedding": (_I, [_P] * 3 + [_L] * 5),
    "rms_norm": (None, [_P] * 3 + [_L] * 5 + [_F] * 2 + [_I] * 2),
    "add_rms_norm": (None, [_P] * 4 + [_L] * 2 + [_F] * 2 + [_I] * 2),
    "layer_norm": (None, [_P] * 4 + [_L] * 5 + [_F] + [_I] * 2),
    "add_layer_norm": (None, [_P] * 5 + [_L] * 2 + [_F] + [_I] * 2),
    "activation": (None, [_P] * 2 + [_L] + [_I] * 2),
    "activation_and_mul": (None, [_P] * 2 + [_L] * 3 + [_I] * 2),
    "xielu": (None, [_P] * 2 + [_L] + [_F] * 4 + [_I]),
    "add": (None, [_P] * 3 + [_L] * 4 + [_I]),
    "scale": (None, [_P] * 2 + [_L] * 3 + [_F, _I]),
    "gate": (None, [_P] * 3 + [_L] * 5 + [_I] * 2),
    "clamp": (None, [_P] * 2 + [_L] * 3 + [_F] * 2 + [_I]),
    "copy_rows": (None, [_P] * 2 + [_L] * 7),
    "mix": (None, [_P] * 4 + [_L] * 10 + [_I]),
    "match_rms": (None, [_P] * 3 + [_L] * 4 + [_F, _I]),
    "gaussian_topk": (None, [_P] * 2 + [_L] * 3 + [_F, _I]),
    "to_float32": (None, [_P] * 2 + [_L] * 3 + [_F, _I]),
    "elementwise": (None, [_P] * 3 + [_L] * 16 + [_D] + [_I] * 4),
    "route_experts": (_I, [_P] * 4 + [_L] * 6 + [_F] * 2 + [_I] * 4),
    "rotary": (_I, [_P] * 4 + [_L] * 11 + [_I] * 2),
    "cache_write": (_I, [_P] * 6 + [_L] * 7 + [_I]),
    "rotary_cache_write": (_I, [_P] * 11 + [_L] * 13 + [_F] * 2 + [_I] * 3),
    "linear_packed_bytes": (_L, [_L] * 2 + [_I]),
    "linear_pack": (None, [_P] * 2 + [_L] * 3 + [_I]),
    "linear": (None, [_P] * 4 + [_L] * 4 + [_I]),
    "linear_activated": (None, [_P] * 4 + [_L] * 4 + [_I] * 2),
    "linear_gated": (None, [_P] * 4 + [_L] * 4 + [_I] * 2),
    "quant_linear_packed_bytes": (_L, [_P]),
    "quant_linear_pack": (None, [_P] * 8 + [_L]),
    "quant_linear_round": (_I, [_P] * 3 + [_L, _I]),
    "round_k_quant": (_I, [_P] * 6 + [_L] * 3 + [_I] * 2),
    "quant_linear": (None, [_P] * 4 + [_L] * 2 + [_I] * 2),
    "quant_linear_gated": (None, [_P] * 4 + [_L] * 2 + [_I] * 3),
    "quant_linear_rows": (_I, [_P] * 3 + [_L, _I]),
    "quant_routed": (_I, [_P] * 6 + [_L] * 5 + [_I] * 2),
    "linear_rows": (_I, [_P] * 3 + [_L] * 3 + [_I]),
    "moe": (_I, [_P] * 8 + [_L] * 7 + [_F] + [_I] * 2),
    "low_rank": (_I, [_P] * 8 + [_L] * 8 + [_I]),
    "expert_linear": (_I, [_P] * 5 + [_L] * 7 + [_I]),
    "paged_attention": (_I, [_P] * 16 + [_L] * 13 + [_F] * 2 + [_I] * 3),
    "varlen_attention": (_I, [_P] * 7 + [_L] * 13 + [_F] * 2 + [_I]),
    "latent_cache_write": (_I, [_P] * 6 + [_L] * 11 + [_I] * 2),
    "latent_attention": (_I, [_P] * 12 + [_L] * 18 + [_F] + [_I] * 2),
    "index_tokens": (_I, [_P] * 7 + [_L] * 14 + [_I]),
    "key_share": (_I, [_P] * 6 + [_L] * 5),
    "lse_correction": (None, [_P] * 3 + [_L] * 5 + [_I]),
    "head_linear": (None, [_P] * 3 + [_L] * 6 + [_I]),
    "causal_conv": (_I, [_P] * 8 + [_L] * 9 + [_I] * 2),
    "selective_scan": (_I, [_P] * 13 + [_L] * 13 + [_I]),
    "state_space_scan": (_I, [_P] * 12 + [_L] * 15 + [_F] * 2 + [_I]),
    "delta_rule": (_I, [_P] * 12 + [_L] * 17 + [_F] * 4 + [_I] * 2),
    "rg_lru": (_I, [_P] * 11 + [_L] * 8 + [_I]),
    "wkv": (_I, [_P] * 9 + [_L] * 7 + [_I]),
    "mlstm": (_I, [_P] * 10 + [_L] * 15 + [_F] * 2 + [_I]),
    "gated_rms_norm": (None, [_P] * 4 + [_L] * 6 + [_F] + [_I] * 4),
    "sample": (None, [_P] * 8 + [_L] * 3 + [_F] + [_I] * 2),
    "top_logprobs": (_I, [_P] * 7 + [_L] * 4 + [_I] * 2),
}
_LETTERS: Mapping[Any, str] = {None: "V", _P: "P", _L: "L", _I: "I", _F: "F", _D: "D"}
"""Letters of types in the library's signatures (native/src/packed.h)."""


class Kernel:
    """One kernel of one :class:`Library`, called like a function.

    What a call does can be replaced (:meth:`Library.recording`), for this library's ops alone.
    """

    __slots__ = ("arguments", "name", "packed", "run")

    def __init__(self, name: str, address: int, packed: int, result: Any, arguments: Any) -> None:
        self.name = name
        self.arguments: tuple[Any, ...] = tuple(arguments)
        """ctypes of the arguments."""
        self.packed = packed
        """Address of the form that takes its arguments in words (native/src/packed.h)."""
        self.run: Callable[..., Any] = ctypes.CFUNCTYPE(result, *arguments)(address)

    def __call__(self, *arguments: Any) -> Any:
        return self.run(*arguments)


class Library:
    """The kernels of one instruction set, as attributes named like the ops.

    Each set of ops has a library of its own, so that one engine's capture is not seen by another.
    """

    def __init__(self, handle: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        self._handle = handle
        self._kernels: list[Kernel] = []
        for name, (result, arguments) in _SIGNATURES.items():
            plain, packed = (handle.hr_kernel(isa.encode(), name.encode(), i) for i in (0, 1))
            kernel = Kernel(name, plain, packed, result, arguments)
            self._kernels.append(kernel)
            setattr(self, name, kernel)

    def __getattr__(self, name: str) -> Kernel:
        raise AttributeError(f"the native library has no kernel {name!r}")

    @contextmanager
    def recording(self, record: Callable[[Kernel, tuple[Any, ...]], None]) -> Iterator[None]:
        """While this lasts kernels of this library do not run: ``record`` gets their calls.

        Every call is answered with 0, the status of success.
        """
        real = [kernel.run for kernel in self._kernels]
        for kernel in self._kernels:
            kernel.run = _recorder(kernel, record)
        try:
            yield
        finally:
            for kernel, run in zip(self._kernels, real):
                kernel.run = run

    def replay(self, *arguments: int) -> int:
        """``hr_replay`` of native/src/replay.cpp: addresses and counts in its order."""
        return int(self._handle.hr_replay(*arguments))

    def replay_parts(self, meanwhile: Callable[[], None], *arguments: int) -> None:
        """``hr_begin_parts`` and ``hr_end_parts`` of native/src/replay.cpp.

        Args:
            meanwhile: called between the two.
            arguments: addresses and counts in the former's order.
        """
        job = self._handle.hr_begin_parts(*arguments)
        try:
            meanwhile()
        finally:
            self._handle.hr_end_parts(job)

    def set_num_threads(self, count: int) -> None:
        """Size of the one pool that all kernels of this process share; results do not depend on it."""
        self._handle.hr_set_num_threads(count)

    def num_threads(self) -> int:
        return int(self._handle.hr_num_threads())

    def bind_threads(self, cores: Sequence[int]) -> None:
        """Bind the pool's threads, one core each; empty: new threads run anywhere. Linux only.

        The first core is for the calling thread, which takes part in every job and is not touched.

        Raises:
            ConfigError: the system would not bind a thread, as when a core is not the process's.
        """
        failed = self._handle.hr_bind_threads((ctypes.c_int32 * len(cores))(*cores), len(cores))
        if failed:
            self._handle.hr_bind_threads((ctypes.c_int32 * 0)(), 0)
            raise ConfigError(
                f"cores = {tuple(cores)!r}: the system bound all but {failed} of "
                f"{self.num_threads()} threads; name cores that this process may use, and none "
                "where only Linux can bind"
            )

    def rendezvous(self, jobs: int, patience: int = 1_000_000) -> int:
        """In how many of so many jobs, one after the other, all threads of the pool took part.

        Each waits for the others for ``patience`` yields at most. Fewer than ``jobs`` means that
        threads sleep through work.
        """
        return int(self._handle.hr_rendezvous(jobs, patience))


def path() -> Path | None:
    """Where the shared library is, None if this installation was built without one."""
    folder = Path(__file__).parent
    for name in ("headrace_cpu.so", "headrace_cpu.dylib"):
        if (folder / name).exists():
            return folder / name
    return None


def why_absent() -> str | None:
    """None if the library is there and loads, else a sentence that says why not and what to do."""
    if path() is None:
        return (
            f"native library not built: {Path(__file__).parent} has no headrace_cpu.so; install a "
            "C++ compiler and reinstall headrace-kernels, the torch reference is used meanwhile"
        )
    try:
        _handle()
    except OSError as error:
        return f"native library cannot be loaded: {error}; the torch reference is used meanwhile"
    except MissingDependency as error:
        return f"native library is stale: {error}; the torch reference is used meanwhile"
    return None


def version() -> str:
    """Version of the package that the library was built from."""
    return str(_handle().hr_version().decode())


def levels() -> list[str]:
    """Instruction sets that this library and this machine have, best first."""
    handle = _handle()
    found: list[str] = []
    while (name := handle.hr_level(len(found))) is not None:
        found.append(name.decode())
    return found


def isa() -> str:
    """The level in use: that of ``HEADRACE_CPU_ISA`` if set, else the best.

    Raises:
        ConfigError: the variable names a level that this machine or library lacks.
    """
    wanted = os.environ.get(ISA_VARIABLE)
    available = levels()
    if not wanted:
        return available[0]
    if wanted not in available:
        raise ConfigError(
            f"{ISA_VARIABLE}={wanted!r} cannot be used: this machine has {available}",
            field=ISA_VARIABLE,
        )
    return wanted


def load(level: str) -> Library:
    """The kernels of one of :func:`levels`, for one set of ops."""
    return Library(_handle(), level)


def usable_cores() -> int:
    """Cores on which the calling thread may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _recorder(
    kernel: Kernel, record: Callable[[Kernel, tuple[Any, ...]], None]
) -> Callable[..., int]:
    def run(*arguments: Any) -> int:
        record(kernel, arguments)
        return 0

    return run


@functools.cache
def _handle() -> ctypes.CDLL:
    found = path()
    if found is None:
        raise _missing(None)
    handle = ctypes.CDLL(str(found))
    try:
        _declare(handle)
    except AttributeError as error:
        raise _missing(f"{found}: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        wanted = "".join(_LETTERS[kind] for kind in (result, *arguments))
        built = handle.hr_signature(b"portable", name.encode())
        if built is None or built.decode() != wanted:
            raise _missing(f"{found}: kernel {name!r} is not that of these sources")
    return handle


def _missing(found: str | None) -> MissingDependency:
    """Error for a library that is absent, or was built from other sources than these: kernels would read
    arguments that nobody gave them."""
    native = Path(__file__).parents[3] / "native"
    install = "pip install --force-reinstall --no-binary headrace-kernels headrace-kernels"
    if (native / "CMakeLists.txt").exists():
        install = f"cmake -S {native} -B {native}/build && cmake --build {native}/build"
    return MissingDependency(
        "headrace_cpu", needed_for="headrace_kernels.cpu", install=install, found=found
    )


def _declare(handle: ctypes.CDLL) -> None:
    """Types of the functions that are no kernels."""
    handle.hr_version.restype = ctypes.c_char_p
    handle.hr_level.restype, handle.hr_level.argtypes = ctypes.c_char_p, [_I]
    handle.hr_kernel.restype = ctypes.c_void_p
    handle.hr_kernel.argtypes = [ctypes.c_char_p, ctypes.c_char_p, _I]
    handle.hr_signature.restype = ctypes.c_char_p
    handle.hr_signature.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    handle.hr_replay.restype = _L
    handle.hr_replay.argtypes = [_P, _L, _P, _P, _L, _P, _P, _P]
    handle.hr_begin_parts.restype = _P
    handle.hr_begin_parts.argtypes = [_P, _L, _P, _L, _P, _L, _P, _L, _L, _P, _P]
    handle.hr_end_parts.restype, handle.hr_end_parts.argtypes = None, [_P]
    handle.hr_set_num_threads.restype, handle.hr_set_num_threads.argtypes = None, [_I]
    handle.hr_num_threads.restype = _I
    handle.hr_bind_threads.restype, handle.hr_bind_threads.argtypes = _I, [_P, _I]
    handle.hr_rendezvous.restype, handle.hr_rendezvous.argtypes = _I, [_I, _I]
