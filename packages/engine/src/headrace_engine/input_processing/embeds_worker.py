"""Reading files of embeddings: ``python -m headrace_engine.input_processing.embeds_worker MAX_BYTES``.

The process takes messages on its standard input and answers on its standard output, one after the
other, and ends when its input does. It limits its own memory and may write no file. This module is
the only one that reads a format which could hold code, and it reads it with ``weights_only``.
"""

from __future__ import annotations

import io
import resource
import sys

import msgspec
import torch

from headrace_core.reliability.sandbox_process import address_space, limit_time, serve
from headrace_core.request import EMBEDS_DTYPES
from headrace_engine.input_processing.embeds import (
    DECODE_SECONDS,
    EmbedsDecodeJob,
    EmbedsRows,
    Job,
)

_ZIP = b"PK\x03\x04"
"""First bytes of a file of ``torch.save``; the older form is not read."""
MOST_NUMBERS = 64
"""Whole numbers in a file of them."""
SPARE_BYTES = 512 << 20
"""Memory beyond what the process has when it is ready, and four times the longest file."""


def checked_rows(value: object, hidden_size: int, dtype: str) -> EmbedsRows:
    """A tensor's rows in the dtype, or why they cannot be a prompt.

    Args:
        value: should be a tensor [num_tokens, hidden_size] or [1, num_tokens, hidden_size].
        hidden_size: the model's.
        dtype: the activations'.
    """
    if not isinstance(value, torch.Tensor):
        return EmbedsRows(error=f"a {type(value).__name__}; must be one tensor")
    reason = _unfit(value, hidden_size)
    if reason:
        return EmbedsRows(error=reason)
    rows = value.detach().reshape(-1, hidden_size).to("cpu", getattr(torch, dtype))
    if not bool(torch.isfinite(rows).all()):
        return EmbedsRows(error=f"a number is not finite in {dtype}, in which the model computes")
    if not bool(torch.isfinite(rows.float().square().sum(-1)).all()):
        # A layer's norm adds up squares in float32: the model would make NaN of them.
        return EmbedsRows(
            error="numbers are so large that a norm of theirs is not finite in float32"
        )
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    return EmbedsRows(num_tokens=rows.shape[0], data=data)


def _unfit(tensor: torch.Tensor, hidden_size: int) -> str:
    """The fault in a tensor's form; looks at no number of it."""
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}); must be one of {list(EMBEDS_DTYPES)}"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}; must be dense"
    if tensor.device.type == "meta":
        return "a tensor without content"
    if str(tensor.dtype).removeprefix("torch.") not in EMBEDS_DTYPES:
        return f"a tensor of {tensor.dtype}; must be one of {list(EMBEDS_DTYPES)}"
    shape = list(tensor.shape)
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or shape[1] != hidden_size or shape[0] < 1:
        return (
            f"a tensor of shape {list(tensor.shape)}; must be [num_tokens, {hidden_size}], the "
            "model's hidden size, with at least one token"
        )
    return ""


def checked_numbers(value: object) -> EmbedsRows:
    """A small tensor's whole numbers, or why they are none."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return EmbedsRows(error=f"a {type(value).__name__}; must be one dense tensor")
    whole = value.dtype in (torch.int64, torch.int32) and value.device.type == "cpu"
    if not whole or not 0 < value.numel() <= MOST_NUMBERS:
        return EmbedsRows(
            error=f"{value.numel()} numbers of {value.dtype}; must be 1 to {MOST_NUMBERS} of int64 or int32"
        )
    return EmbedsRows(numbers=value.flatten().tolist())


def decode(job: Job) -> EmbedsRows:
    """Read a file."""
    try:
        value = _read_torch(job.data) if job.data.startswith(_ZIP) else _read_safetensors(job.data)
    except MemoryError:
        return EmbedsRows(error="reading the file needs too much memory")
    except Exception:  # whatever a hostile file makes a reader raise; its words stay here
        return EmbedsRows(
            error="no file of torch.save (weights only) or safetensors that holds one tensor"
        )
    if isinstance(job, EmbedsDecodeJob):
        return checked_rows(value, job.hidden_size, job.dtype)
    return checked_numbers(value)


def _read_torch(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _read_safetensors(data: bytes) -> object:
    from safetensors.torch import load

    tensors = load(data)
    if len(tensors) != 1:
        raise ValueError("one tensor is wanted")
    return next(iter(tensors.values()))


def main() -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    import safetensors.torch  # noqa: F401 - before memory is limited

    _limit(int(sys.argv[1]))
    serve(_answer)


def _answer(message: bytes) -> bytes:
    job = msgspec.msgpack.decode(message, type=Job)
    limit_time(DECODE_SECONDS)
    try:
        rows = decode(job)
    except MemoryError:
        rows = EmbedsRows(error="reading the file needs too much memory")
    return msgspec.msgpack.encode(rows)


def _limit(max_bytes: int) -> None:
    limit = address_space() + 4 * max_bytes + SPARE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
