"""Operations of torch that a recorded step may contain, as kernel calls that give torch's bits.

IEEE 754 fixes the result of a sum, a product, a quotient and a rounding, and a copy has no bits of its
own. Whoever computes these gets the same: torch in an eager step, kernels when the step is replayed.
What no standard fixes (exponentials, sums of many numbers, products of matrices), and what torch does
not compute as the standard has it (roots), is not here, and refuses the capture.

Which dtype and layout a result has is torch's to say: it does the operation on the device ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import CaptureRefused
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import CODES

OPERATIONS = ("copy", "add", "sub", "mul", "div", "neg", "abs")
"""In the order of their codes, native/src/strided.h."""
COPY, ADD, SUB, MUL, DIV, NEG, ABS = range(len(OPERATIONS))
CODE_AT = 20
"""The code's place among the kernel's arguments."""
_KINDS: Mapping[torch.dtype, int] = {**CODES, torch.int64: 3, torch.int32: 4, torch.bool: 5}
_MOST_LOOPS = 4
_MOST_WHOLE = 1 << 53
"""Up to here every whole number is a float of 64 bits, as the kernel takes it."""

Operand = Tensor | float


class Loop(NamedTuple):
    """One loop of an elementwise kernel: how often, and a step's elements for each tensor."""

    size: int
    steps: tuple[int, ...]


class TorchOperations:
    """Operations of torch in one pass.

    Args:
        library: that of the recorded kernels.
        allocate: memory of the pass for a tensor of the device ``meta``.
        owns: whether a tensor's memory is of the pass.
        kept: gets the tensors that are read and not of the pass. What the step makes anew each time,
            unseen by torch, so has another address in each pass, and refuses the capture.
        constants: tensors that the step made of Python's numbers, by content. Of all passes, so that
            one that depends on a size is another object in each.
    """

    def __init__(
        self,
        library: Library,
        allocate: Callable[[Tensor], Tensor],
        owns: Callable[[Tensor], bool],
        kept: list[Any],
        constants: dict[Any, Tensor],
    ) -> None:
        self._library = library
        self._allocate, self._owns = allocate, owns
        self._kept, self._constants = kept, constants

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The operation's result, its calls recorded; NotImplemented of one that is not known."""
        rule = _RULES.get(func._schema.name)
        if rule is None or "out" in kwargs:
            return NotImplemented
        return rule(self, func, args, kwargs)

    # ---- what operations are made of

    def out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Memory for a result; of an operation in place its first argument."""
        if func._schema.is_mutable:
            target: Tensor = args[0]
            if not self._owns(target):
                raise CaptureRefused(f"torch operation {func} changes what outlives the step")
            return target
        return self._allocate(_on_meta(func, args, kwargs))

    def elementwise(self, operation: int, out: Tensor, a: Operand, b: Operand = 0.0) -> Tensor:
        """Call the kernel: out = operation(a, b), both broadcast; of numbers at most one."""
        operands = [x for x in (a, b) if isinstance(x, Tensor)]
        self._keep(operands)
        _check_kinds(operation, out, operands)
        if out.numel() == 0:
            return out
        loops = _loops(out, [x.expand(out.shape) for x in operands])
        if len(loops) > _MOST_LOOPS:
            raise CaptureRefused(f"a torch operation over {len(loops)} dimensions")
        words = [word for loop in _padded(loops) for word in _four(loop, a, b)]
        pointers = [x.data_ptr() if isinstance(x, Tensor) else None for x in (a, b)]
        kinds = [_KINDS[x.dtype] if isinstance(x, Tensor) else 0 for x in (out, a, b)]
        number = next((x for x in (a, b) if not isinstance(x, Tensor)), 0.0)
        if out.dtype is torch.int64 and abs(number) > _MOST_WHOLE:
            raise CaptureRefused(f"a torch operation with {number}, which no float is exactly")
        self._library.elementwise(out.data_ptr(), *pointers, *words, number, operation, *kinds)
        return out

    def rows(self, out: Tensor, table: Tensor, ids: Tensor, what: Any) -> Tensor:
        """Call the kernel: rows ``ids`` of a table [N, n]."""
        self._keep([table, ids])
        (size, width), item = table.shape, table.element_size()
        plain = ids.dtype is torch.int64 and ids.is_contiguous() and out.is_contiguous()
        if not plain or (width > 1 and table.stride(1) != 1):
            raise CaptureRefused(
                f"torch operation {what} of {ids.dtype} strides {ids.stride()}, table {table.stride()}"
            )
        self._library.embedding(
            out.data_ptr(), ids.data_ptr(), table.data_ptr(),
            width * item, table.stride(0) * item, ids.numel(), size, -1,
        )  # fmt: skip
        return out

    def _keep(self, operands: Sequence[Tensor]) -> None:
        self._kept += [x for x in operands if not self._owns(x)]

    def constant(self, found: Tensor) -> Tensor:
        """A tensor made of Python's numbers: one object for each content."""
        content = bytes(found.flatten().view(torch.uint8).tolist())  # -0 is no 0, NaN is NaN
        key = (found.dtype, found.shape, content)
        return self._constants.setdefault(key, found)


def _on_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The result without its values."""

    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return [moved(each) for each in x] if isinstance(x, (list, tuple)) else x

    named = {name: "meta" if name == "device" else moved(x) for name, x in kwargs.items()}
    if "device" not in named and any(x.name == "device" for x in func._schema.arguments):
        named["device"] = "meta"
    result: Tensor = func(*moved(args), **named)
    return result


def _check_kinds(operation: int, out: Tensor, operands: Sequence[Tensor]) -> None:
    """The kernel makes floats of anything, and 64-bit numbers of whole ones."""
    dtypes = [x.dtype for x in operands]
    if operation == COPY and dtypes == [out.dtype] and out.dtype in _KINDS:
        return
    known = all(dtype in _KINDS for dtype in dtypes)
    whole = not any(dtype.is_floating_point for dtype in dtypes) and operation != DIV
    if not known or not (out.dtype in CODES or (out.dtype is torch.int64 and whole)):
        raise CaptureRefused(f"a torch operation of {dtypes} that gives {out.dtype}")


def _loops(out: Tensor, operands: Sequence[Tensor]) -> list[Loop]:
    """Loops over all elements, outermost first; neighbours that are one loop for all tensors joined."""
    steps = zip(out.stride(), *(x.stride() for x in operands))
    found = [Loop(size, step) for size, step in zip(out.shape, steps) if size > 1]
    found.sort(key=lambda loop: -loop.steps[0])
    joined: list[Loop] = []
    for loop in found:
        if joined and all(a == b * loop.size for a, b in zip(joined[-1].steps, loop.steps)):
            loop = Loop(joined.pop().size * loop.size, loop.steps)
        joined.append(loop)
    return joined


def _padded(loops: Sequence[Loop]) -> list[Loop]:
    return [Loop(1, (0, 0, 0))] * (_MOST_LOOPS - len(loops)) + list(loops)


def _four(loop: Loop, a: Operand, b: Operand) -> tuple[int, int, int, int]:
    """Size, and steps of output and operands; numbers have none."""
    steps = iter(loop.steps)
    out = next(steps)
    a_step, b_step = (next(steps, 0) if isinstance(x, Tensor) else 0 for x in (a, b))
    return loop.size, out, a_step, b_step


# ---- the operations

_Rule = Callable[[TorchOperations, Any, Sequence[Any], Mapping[str, Any]], Any]


def _binary(operation: int, *, swapped: bool = False) -> _Rule:
    def rule(
        to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        a, b, *alpha = args
        if [*alpha, *kwargs.values()] not in ([], [1]):
            raise CaptureRefused(f"torch operation {func} with {[*alpha, *kwargs.values()]}")
        out = to.out(func, args, kwargs)
        _check_rounding(func, operation, out.dtype, a, b)
        if operation in (ADD, SUB):
            a, b = (_rounded(x, out.dtype) for x in (a, b))
        first, second = (b, a) if swapped else (a, b)
        return to.elementwise(operation, out, first, second)

    return rule


def _check_rounding(
    func: Any, operation: int, dtype: torch.dtype, first: Operand, second: Operand
) -> None:
    """Operands of another dtype than a short result are rounded to it first, but for numbers by which
    torch multiplies and divides: those it takes as they are."""
    if dtype not in (torch.bfloat16, torch.float16):
        return
    exempt = second if operation in (MUL, DIV) else None
    for x in (first, second):
        if isinstance(x, Tensor) and x.dtype is not dtype and (x is not exempt or x.dim()):
            raise CaptureRefused(f"torch operation {func} of {x.dtype} that gives {dtype}")


def _rounded(x: Operand, dtype: torch.dtype) -> Operand:
    """A number as torch adds it: of the result's dtype, where it multiplies by the number itself."""
    if isinstance(x, Tensor) or not dtype.is_floating_point:
        return x
    return float(torch.tensor(x, dtype=dtype))


def _unary(operation: int) -> _Rule:
    def rule(
        to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        return to.elementwise(operation, to.out(func, args, kwargs), args[0])

    return rule


def _copy_into(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    return to.elementwise(COPY, to.out(func, args, kwargs), args[1])


def _reciprocal(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    return to.elementwise(DIV, to.out(func, args, kwargs), 1.0, args[0])


def _power(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """A square is a product; torch rounds higher powers in ways of its own."""
    x, exponent = args
    known = isinstance(x, Tensor) and x.is_floating_point() and not isinstance(exponent, Tensor)
    if not known or exponent != 2:
        raise CaptureRefused(f"torch operation {func} of {exponent}")
    return to.elementwise(MUL, to.out(func, args, kwargs), x, x)


def _filled(value: float | None = None, at: int = 0) -> _Rule:
    """By a value, else by an argument: that at the place ``at``."""

    def rule(
        to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor:
        number = args[at] if value is None else value
        return to.elementwise(COPY, to.out(func, args, kwargs), number)

    return rule


def _cat(to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    out, at = to.out(func, args, kwargs), 0
    dim = args[1] if len(args) > 1 else 0
    for part in args[0]:
        size = part.shape[dim] if part.dim() == out.dim() else 0
        if size:
            to.elementwise(COPY, out.narrow(dim, at, size), part)
        at += size
    return out


def _stack(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    out = to.out(func, args, kwargs)
    dim = args[1] if len(args) > 1 else 0
    for index, part in enumerate(args[0]):
        to.elementwise(COPY, out.select(dim, index), part)
    return out


def _pad(to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    x, widths, *value = args
    out = to.out(func, args, kwargs)
    inside = to.elementwise(COPY, out, value[0] if value else 0.0)
    for index, before in enumerate(widths[::2]):
        after, dim = widths[2 * index + 1], x.dim() - 1 - index
        if before < 0 or after < 0:
            raise CaptureRefused(f"torch operation {func} that cuts off")
        inside = inside.narrow(dim, before, x.shape[dim])
    to.elementwise(COPY, inside, x)
    return out


def _repeat(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    x, times = args
    out = to.out(func, args, kwargs)
    shape = (1,) * (len(times) - x.dim()) + tuple(x.shape)
    each = [size for pair in zip(times, shape) for size in pair]
    source = x.view(shape)
    for dim in range(len(times)):
        source = source.unsqueeze(2 * dim)
    to.elementwise(COPY, out.view(each), source)
    return out


def _embedding(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    return to.rows(to.out(func, args, kwargs), args[0], args[1], func)


def _gather(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """View of a list: all dimensions but one have the size 1."""
    x, dim, ids = args[:3]
    if x.numel() != x.shape[dim] or ids.numel() != ids.shape[dim]:
        raise CaptureRefused(f"torch operation {func} of more than a list")
    table = x.as_strided((x.shape[dim], 1), (x.stride(dim), 1))
    return to.rows(to.out(func, args, kwargs), table, ids, func)


def _constant(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    return to.constant(args[0])


def _itself(to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0]


def _same_memory(
    to: TorchOperations, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    """A view that torch does not call one."""
    view: Tensor = func(*args, **kwargs)
    return view


_RULES: Mapping[str, _Rule] = {
    "aten::add": _binary(ADD), "aten::add_": _binary(ADD),
    "aten::sub": _binary(SUB), "aten::sub_": _binary(SUB), "aten::rsub": _binary(SUB, swapped=True),
    "aten::mul": _binary(MUL), "aten::mul_": _binary(MUL),
    "aten::div": _binary(DIV), "aten::div_": _binary(DIV), "aten::reciprocal": _reciprocal,
    "aten::neg": _unary(NEG), "aten::abs": _unary(ABS), "aten::pow": _power,
    "aten::clone": _unary(COPY), "aten::_to_copy": _unary(COPY), "aten::copy_": _copy_into,
    "aten::_unsafe_view": _same_memory,
    "aten::zeros": _filled(0.0), "aten::zeros_like": _filled(0.0), "aten::new_zeros": _filled(0.0),
    "aten::zero_": _filled(0.0), "aten::ones": _filled(1.0), "aten::ones_like": _filled(1.0),
    "aten::new_ones": _filled(1.0), "aten::full": _filled(at=1), "aten::full_like": _filled(at=1),
    "aten::scalar_tensor": _filled(at=0),
    "aten::cat": _cat, "aten::stack": _stack, "aten::constant_pad_nd": _pad, "aten::repeat": _repeat,
    "aten::embedding": _embedding, "aten::gather": _gather,
    "aten::lift_fresh": _constant, "aten::detach_": _itself,
}  # fmt: skip
"""torch's name of an operation, all its overloads -> what it is recorded as."""
