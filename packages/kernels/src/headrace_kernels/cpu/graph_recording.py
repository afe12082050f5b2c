"""One recorded pass: which kernels were called, with what, and when its memory came and went.

While a pass is recorded no kernel runs. What the pass allocates through torch is address space that
nobody touches. Views are taken; operations of torch that have kernels of the same bits are recorded
as those (:mod:`~headrace_kernels.cpu.graph_torch`); any other refuses the recording.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_core.errors import CaptureRefused
from headrace_core.graph import RecordsCalls
from headrace_kernels.cpu.graph_torch import TorchOperations
from headrace_kernels.cpu.library import Kernel, Library


class Word(NamedTuple):
    """One argument of a recorded call."""

    value: int | float
    """A number; or an address, relative to its base if it has one."""
    base: str = ""
    """"" for none, ``memory`` for a block of this pass, ``input`` for one of the step's tensors."""
    which: int = 0
    """The block or input."""


class RecordedCall(NamedTuple):
    kernel: Kernel
    words: tuple[Word, ...]


class MemoryEvent(NamedTuple):
    """A block is allocated, or given back (``num_bytes`` -1)."""

    block: int
    num_bytes: int


@dataclass(slots=True)
class Recording:
    """Record of one pass."""

    calls: list[RecordedCall] = field(default_factory=list)
    events: list[MemoryEvent] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    """Objects whose addresses are among the arguments."""
    computes_by_torch: bool = False
    """True if operations of torch are among what was recorded."""
    result: Word = field(default_factory=lambda: Word(0))
    result_shape: tuple[int, ...] = ()
    result_dtype: torch.dtype = torch.float32


def record(
    library: Library,
    inputs: Sequence[Tensor],
    run: Callable[[], Tensor],
    constants: dict[Any, Tensor],
    recorders: Sequence[RecordsCalls] = (),
) -> Recording:
    """Record ``run``, whose result is a contiguous floating tensor.

    Args:
        library: that of the ops which ``run`` calls.
        inputs: tensors whose addresses differ from step to step.
        constants: tensors that the step makes of Python's numbers, filled here; one object for all
            recordings of a step, to be kept as long as they are.
        recorders: others whose native calls ``run`` makes.

    Raises:
        CaptureRefused: it does what cannot be recorded.
    """
    pass_ = _Pass(library, inputs, constants)
    with ExitStack() as stack:
        for recorder in (library, *recorders):
            stack.enter_context(recorder.recording(pass_.call))
        stack.enter_context(pass_)
        try:
            result = run()
        except CaptureRefused:
            raise
        except Exception as error:
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
    pass_.finish(result)
    return pass_.recording


_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::new_empty")
_READS = ("aten::resolve_conj", "aten::resolve_neg")
"""Views in name: what ``tolist()`` and ``numpy()`` begin with."""
_CONSTANT = "aten::lift_fresh"
"""A view in name: a tensor made of Python's numbers comes in."""


class _Pass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of torch on this thread."""

    def __init__(
        self, library: Library, inputs: Sequence[Tensor], constants: dict[Any, Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._torch = TorchOperations(
            library, self._allocate, self._owns, self.recording.kept, constants
        )
        self._inputs = [(x.data_ptr(), x.untyped_storage().nbytes()) for x in inputs]
        self._blocks: dict[int, tuple[int, int]] = {}
        self._references: list[Any] = []
        self._finished = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler (seconds) to keep it away from this mode."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in _ALLOCATIONS:
            return self._allocate(func(*args, **{**kwargs, "device": "meta"}))
        if name in _READS:
            raise CaptureRefused(f"torch operation {func} reads what is not known before the step")
        if func.is_view and name != _CONSTANT:
            out = func(*args, **kwargs)
            if _shares_memory(args[0], out):
                return out
        out = self._torch.run(func, args, kwargs)
        if out is not NotImplemented:
            self.recording.computes_by_torch = True
            return out
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # what it is made of comes here
                return func.decompose(*args, **kwargs)
        raise CaptureRefused(f"torch operation {func} is not a recorded kernel")

    def _allocate(self, meta: Tensor) -> Tensor:
        """Memory for a tensor without gaps."""
        num_bytes = meta.numel() * meta.element_size()
        if meta.numel() and 1 + sum(map(_span, meta.shape, meta.stride())) != meta.numel():
            raise CaptureRefused(f"memory of {list(meta.shape)} with strides {meta.stride()}")
        memory = np.empty(max(1, num_bytes), np.uint8)
        block = len(self._references)
        self._blocks[block] = (memory.ctypes.data, memory.nbytes)
        self.recording.events.append(MemoryEvent(block, num_bytes))
        # torch's storage holds the array: it dies with the last view of it.
        self._references.append(weakref.ref(memory, lambda _: self._release(block)))
        flat = torch.from_numpy(memory)[:num_bytes].view(meta.dtype)
        return flat.as_strided(meta.shape, meta.stride())

    def _owns(self, x: Tensor) -> bool:
        return self._address(x.data_ptr()).base == "memory"

    def _release(self, block: int) -> None:
        self._blocks.pop(block, None)
        if not self._finished:
            self.recording.events.append(MemoryEvent(block, -1))

    def call(self, kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        """A kernel was called."""
        if len(arguments) != len(kernel.arguments):
            raise CaptureRefused(f"{kernel.name} was called with {len(arguments)} arguments")
        words = tuple(map(self._word, arguments, kernel.arguments))
        self.recording.calls.append(RecordedCall(kernel, words))

    def _word(self, argument: Any, kind: Any) -> Word:
        if kind in (ctypes.c_float, ctypes.c_double):
            return Word(float(argument))
        if kind is not ctypes.c_void_p:
            return Word(operator.index(argument))
        if argument is None:
            return Word(0)
        if isinstance(argument, int):
            return self._address(argument)
        self.recording.kept.append(argument)
        return Word(ctypes.addressof(argument))

    def _address(self, address: int) -> Word:
        for block, (start, size) in self._blocks.items():
            if start <= address < start + size:
                return Word(address - start, "memory", block)
        for index, (start, size) in enumerate(self._inputs):
            if start <= address < start + size:
                return Word(address - start, "input", index)
        return Word(address)

    def finish(self, result: Tensor) -> None:
        """Note where the result is; what is freed from now on is not part of the pass."""
        self._finished = True
        if not result.is_floating_point() or not result.is_contiguous():
            raise CaptureRefused(f"the result is {result.dtype} of strides {result.stride()}")
        self.recording.result = self._address(result.data_ptr())
        self.recording.result_shape = tuple(result.shape)
        self.recording.result_dtype = result.dtype
        if self.recording.result.base != "memory":
            raise CaptureRefused("the result is not of this pass")


def _span(size: int, stride: int) -> int:
    return (size - 1) * stride


def _shares_memory(of: Any, out: Any) -> bool:
    """True if all results are views of the first argument."""
    if not isinstance(of, Tensor):
        return False
    memory = of.untyped_storage().data_ptr()
    results = out if isinstance(out, (list, tuple)) else (out,)
    return all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() == memory for x in results)
