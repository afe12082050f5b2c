"""``awq``: the layout ``gemm`` of AutoAWQ: 4 bits with zero points, a scale for every 128 inputs.

Lin et al. 2023, arXiv:2306.00978, describe the method. Only its layout is written here: scales have the least
squared error of the weights, without regard to activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_core.linear import WeightEncoder
from headrace_quant.encoders.least_squares import asymmetric, columns, inverse, rows_at_once

GROUP = 128
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Place among eight outputs of each field of a word, the lowest first."""


class AWQEncoder(WeightEncoder):
    """``qweight`` int32 [K, N / 8], ``qzeros`` int32 [K / 128, N / 8], ``scales`` float16 [K / 128, N]."""

    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        rows, inputs = weight.shape
        if inputs % GROUP or rows % 8:
            return None
        codes = torch.empty(rows, inputs, dtype=torch.uint8)
        scales = torch.empty(rows, inputs // GROUP, dtype=torch.float16)
        zeros = torch.empty(rows, inputs // GROUP, dtype=torch.uint8)
        step = rows_at_once(inputs)
        for start in range(0, rows, step):
            own = slice(start, start + step)
            groups = columns(weight[own], GROUP)
            scale, minimum = asymmetric(groups, 15)
            scale = scale.half()
            finer = inverse(scale.float())
            zero = (minimum * finer).round_().clamp_(0, 15)
            numbers = (groups * finer).round_().add_(zero).clamp_(0, 15)
            scales[own], zeros[own] = (each.view(-1, inputs // GROUP) for each in (scale, zero))
            codes[own].view(-1, GROUP).copy_(numbers.T)
        return {
            "qweight": _words(codes.T),
            "qzeros": _words(zeros.T),
            "scales": scales.T.contiguous(),
        }

    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        return {
            "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True,
            "modules_to_not_convert": list(left) or None,
        }  # fmt: skip


def _words(codes: Tensor) -> Tensor:
    """codes [R, N] uint8 -> [R, N / 8] int32."""
    eight = codes.reshape(codes.shape[0], -1, 8)[..., list(_ORDER)].long()
    return (eight << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)
