"""Functions of torch that a tree calls itself and whose bits no standard fixes, by headrace's ops.

An activation that is a module is another module's affair (:mod:`.op_matching`). One that code calls as a
function is met where torch lets functions be replaced, in steps of trees that call one: eager steps and
recorded ones then compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops import OpTable

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Functions(TorchFunctionMode):
    """While it lasts, activations that are called as functions are ops."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__()
        self.table = _table(ops)
        self.is_used = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        ours = self.table.get(func)
        if ours is not None and _is_plain(args, kwargs):
            self.is_used = True
            return ours(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class WithFunctions:
    """A call in which functions are ops, if it calls any: the first time shows, as all are alike."""

    def __init__(self, ops: OpTable, call: Callable[..., Any]) -> None:
        self.call, self.mode = call, Functions(ops)
        self.around: AbstractContextManager[Any] = self.mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.around:
            result = self.call(*args, **kwargs)
        if not self.mode.is_used:
            self.around = nullcontext()
        return result


def _is_plain(args: Any, kwargs: Mapping[str, Any] | None) -> bool:
    """True if it is one tensor of ours, and not to be changed in place."""
    plain = len(args) == 1 and isinstance(args[0], torch.Tensor) and args[0].dtype in _DTYPES
    named = {name for name, value in (kwargs or {}).items() if value is not False}
    return plain and named <= {"approximate"} and args[0].dim() > 0


def _table(ops: OpTable) -> Mapping[Any, Callable[..., Tensor]]:
    def activation(kind: str) -> Callable[..., Tensor]:
        return lambda x, **_: ops.activation(x, kind)

    def gelu(x: Tensor, approximate: str = "none") -> Tensor:
        return ops.activation(x, "gelu_tanh" if approximate == "tanh" else "gelu")

    def tanh(x: Tensor) -> Tensor:
        rows = ops.to_float32(x.reshape(-1, x.shape[-1]), soft_cap=1.0)
        return rows.to(x.dtype).view(x.shape)

    def sigmoid(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return ops.gate(torch.ones_like(rows), rows, activation="sigmoid").view(x.shape)

    silu, relu = activation("silu"), activation("relu")
    return {
        functional.silu: silu, torch._C._nn.silu: silu,
        functional.gelu: gelu,
        functional.relu: relu, torch.relu: relu, torch.Tensor.relu: relu,
        torch.tanh: tanh, torch.Tensor.tanh: tanh,
        torch.sigmoid: sigmoid, torch.Tensor.sigmoid: sigmoid,
    }  # fmt: skip
