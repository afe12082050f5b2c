"""Runs kernels on tensors behind which memory ends: who reads or writes beyond one ends the process.

``python ends_of_memory.py``; a test runs it in a process of its own. Results are compared with those on
ordinary memory, to the bit.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from dataclasses import fields
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from headrace_core.ops import QuantizedWeight, Rounding
from headrace_kernels.cpu import library
from headrace_kernels.cpu.ops import native_ops
from headrace_testing.ops import (
    bits_equal,
    index_case,
    mla_case,
    paged_case,
    rand,
    varlen_case,
)
from headrace_testing.ops.mla import with_topk
from headrace_testing.ops.weights import KINDS

_NO_ACCESS = 0
_WIDTHS = (1, 15, 33, 64, 100, 129)
_libc = ctypes.CDLL(None, use_errno=True)


def memory_that_ends(num_bytes: int) -> Tensor:
    """[num_bytes] uint8, with a page behind it that nobody may touch."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    region = mmap.mmap(-1, size + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    last = ctypes.c_void_p(start + size)
    assert _libc.mprotect(last, ctypes.c_size_t(mmap.PAGESIZE), _NO_ACCESS) == 0
    found = torch.frombuffer(region, dtype=torch.uint8)[size - num_bytes : size]
    return found


def empty(*shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ``torch.empty`` in ops."""
    return memory_that_ends(prod(shape) * dtype.itemsize).view(dtype).view(shape)


def moved(x: Any) -> Any:
    """The tensor with the same strides where memory ends."""
    if not isinstance(x, Tensor) or x.numel() == 0:
        return x
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    raw = x.as_strided((length,), (1,)).contiguous().view(torch.uint8)
    bytes_ = memory_that_ends(raw.numel()).copy_(raw)
    return bytes_.view(x.dtype).as_strided(x.shape, x.stride())


def where_memory_ends(op: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **options: Any) -> Any:
        given = [moved(x) for x in arguments]
        with patch("torch.empty", empty):
            return op(*given, **{name: moved(x) for name, x in options.items()})

    return run


def packed_product(linear: Any, x: Tensor, bias: Tensor, *parts: Any) -> Tensor:
    """Rows times a weight that is packed here, one of them alone too, and rows of the weight."""
    packed = linear.pack(
        QuantizedWeight(*parts), str(x.dtype).removeprefix("torch."), activations="float"
    )
    own = linear.rows(torch.arange(packed.out_features), packed)
    return torch.cat(
        [linear(each, packed, bias).flatten() for each in (x, x[:1])] + [own.flatten()]
    )


def rounded_numbers(op: Any, weight: Tensor, bits: int) -> Tensor:
    """All that a weight is rounded to."""
    found = op(weight, bits)
    parts = [getattr(found, field.name) for field in fields(found)]
    return torch.cat([part.flatten().float() for part in parts if isinstance(part, Tensor)])


def adapted(op: Any, slots: Tensor, x: Tensor, out: Tensor, *factors: Tensor) -> Tensor:
    """What adapters add, their memory made here."""
    memory = op.allocate(2, factors[0].shape[0], x.shape[1], [out.shape[1]], x)
    op.write(memory, 1, 0, *factors, 0.5)
    own = torch.empty(*out.shape, dtype=out.dtype).copy_(out)
    found: Tensor = op(own, x, memory, slots)
    return found


def calls(ops: Any, dtype: str) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """(what, a function of a way to call ops, its arguments)."""
    for width in _WIDTHS:
        x, bias = rand(13, 40, dtype=dtype), rand(width, dtype=dtype)
        weight = rand(width, 40, dtype=dtype, seed=1)
        packed = ops["linear"].pack(weight)
        yield f"linear of {width}", ops["linear"], (x, packed, bias)
        yield f"activated of {width}", ops["linear"].activated, (x, packed, "gelu", bias)
        both = ops["linear"].pack(rand(2 * width, 40, dtype=dtype, seed=1))
        yield f"gated of {width}", ops["linear"].gated, (x, both, "silu")
        ids, by = torch.arange(26).remainder(3).view(13, 2), rand(13, 2)
        experts = ops["expert_linear"].pack(weight.expand(3, -1, -1).contiguous())
        yield f"experts of {width}", ops["expert_linear"], (x, experts, ids, by)
        slots = torch.arange(13, dtype=torch.int32).remainder(2)
        for rank in (1, 9):
            factors = rand(rank, width, dtype=dtype), rand(40, rank, dtype=dtype)
            arguments = slots, rand(13, width, dtype=dtype), x
            yield f"low_rank, {width} to 40", adapted, (ops["low_rank"], *arguments, *factors)
            factors = rand(rank, 40, dtype=dtype), rand(width, rank, dtype=dtype)
            arguments = slots, x, rand(13, width, dtype=dtype)
            yield f"low_rank, 40 to {width}", adapted, (ops["low_rank"], *arguments, *factors)
        integers = ops["quant_linear"].round(weight, dtype, Rounding(8, None), activations="float")
        joined = ops["quant_linear"].join([integers] * 3)
        yield f"routed integers of {width}", ops["quant_linear"].routed, (x, joined, ids)
        for kind in ("q2_k", "q3_k", "q5_k", "q6_k", "q8_0", "iq2_s", "nf4", "fp8-128"):
            drawn = KINDS[kind].draw(width, 40)
            parts = [getattr(drawn, field.name) for field in fields(drawn)]
            yield f"{kind} of {width}", packed_product, (ops["quant_linear"], x, bias, *parts)
        rows = rand(5, width + 2, dtype=dtype)[:, 2:]
        like = rand(5, width, dtype=dtype, seed=1)
        yield f"gate of {width}", ops["gate"], (rows, like)
        yield f"match_rms of {width}", ops["match_rms"], (rows, like, 1e-5)
        yield f"mix of {width}", ops["mix"], (rows[:, None], rand(5, 3, 1))
    for case in (
        paged_case([(1, 70), (9, 600)], dtype=dtype, head_dim=40),
        paged_case([(1, 70), (9, 33)], dtype=dtype, num_heads=8, num_kv_heads=1, prefix=3),
    ):
        yield "paged attention", lambda op, case=case: case.run(op), (ops["paged_attention"],)
    packed_rows = varlen_case([5, 70], dtype=dtype, num_heads=2, head_dim=40)
    yield "varlen attention", packed_rows.run, (ops["varlen_attention"],)
    latents = with_topk(mla_case([(1, 70), (9, 600)], dtype=dtype, rope_dim=7), 20)
    yield "latent attention", latents.run, (ops["mla_attention"],)
    index = index_case([(1, 70), (3, 90)], dtype=dtype, top_k=20, dim=33)
    yield "index_tokens", index.run, (ops["index_tokens"],)
    for bits in (4, 5, 6):
        weight = rand(3, 768, dtype=dtype)
        yield f"round_k_quant, {bits}", rounded_numbers, (ops["round_k_quant"], weight, bits)


def main() -> None:
    for level in library.levels():
        kernels = library.load(level)
        kernels.set_num_threads(1)
        ops = native_ops(kernels)
        for dtype in ("float32", "bfloat16"):
            for what, function, arguments in calls(ops, dtype):
                print(level, dtype, what, flush=True)
                expected = function(*arguments)
                if len(arguments) == 1:
                    found = function(where_memory_ends(arguments[0]))
                else:
                    found = where_memory_ends(function)(*arguments)
                assert bits_equal(found, expected)


if __name__ == "__main__":
    main()
