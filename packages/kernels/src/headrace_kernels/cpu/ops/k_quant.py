"""Weights in the numbers of GGUF's k-quants."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import QuantizedWeight
from headrace_kernels.cpu.library import BAD_VALUES, Library
from headrace_kernels.cpu.ops.arguments import dtype_code, matrix, pointer

_BLOCK = 256


class RoundKQuant:
    """See :class:`headrace_core.ops.optional.round_k_quant.RoundKQuantOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.round_k_quant

    def __call__(self, weight: Tensor, bits: int) -> QuantizedWeight:
        weight, rows, stride = matrix(weight)
        inputs, size = weight.shape[1], 16 if bits == 6 else 32
        if inputs % _BLOCK or bits not in (4, 5, 6):
            raise ConfigError(
                f"round_k_quant: a weight of {inputs} inputs in {bits} bits; inputs must be a multiple of "
                f"{_BLOCK}, bits 4, 5 or 6"
            )
        values = torch.empty(rows, inputs, dtype=torch.int8)
        scales, minimums, outer, outer_minimums = (
            torch.empty(rows, inputs // each, dtype=torch.float32)
            for each in (size, size, _BLOCK, _BLOCK)
        )
        parts = (values, scales, minimums, outer, outer_minimums)
        status = self._kernel(
            *map(pointer, parts),
            weight.data_ptr(),
            stride,
            rows,
            inputs,
            bits,
            dtype_code(weight.dtype),
        )
        if status == BAD_VALUES:
            raise WeightsError("the weight holds infinities or NaN")
        if bits == 6:
            return QuantizedWeight(
                values, scales, bits=6, group_size=size, block_scales=outer, block_size=_BLOCK
            )
        return QuantizedWeight(
            values,
            scales,
            torch.full(scales.shape, -(1 << bits - 1), dtype=torch.int8),
            bits,
            size,
            minimums=minimums,
            block_scales=outer,
            block_minimums=outer_minimums,
            block_size=_BLOCK,
        )
