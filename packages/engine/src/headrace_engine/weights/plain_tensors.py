"""Which tensors may be weights: plain numbers in memory, of a type that has a name on every way."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import RequestError
from headrace_engine.weights.messages import ITEM_BYTES


def plain(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is dense, has numbers, and is of one of the dtypes of
    :data:`~headrace_engine.weights.messages.ITEM_BYTES`. It may be a view, and need not be contiguous.

    Raises:
        RequestError: it is something else; says what to give instead.
    """
    if not isinstance(tensor, Tensor):
        raise _wrong(name, f"is a {type(tensor).__name__}", "a torch tensor")
    kind = type(tensor)
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        hint = "its full_tensor()" if hasattr(tensor, "full_tensor") else "the tensor inside it"
        raise _wrong(name, f"is a {kind.__name__}", f"a plain torch tensor: give {hint}")
    if tensor.is_meta:
        raise _wrong(name, "is on the device 'meta' and has no numbers", "in memory")
    if tensor.is_quantized:
        raise _wrong(
            name,
            f"is quantized by torch ({tensor.dtype})",
            "floats (dequantize()), or the packed tensors of the checkpoint's own format",
        )
    if tensor.layout is not torch.strided:
        raise _wrong(name, f"is sparse ({tensor.layout})", "dense: to_dense()")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise _wrong(name, f"has dtype {dtype}", f"of {', '.join(ITEM_BYTES)}")
    return tensor


def _wrong(name: str, what: str, accepted: str) -> RequestError:
    return RequestError(
        f"update_weights: tensor {name!r:.200} {what}: must be {accepted}", param="weights"
    )
