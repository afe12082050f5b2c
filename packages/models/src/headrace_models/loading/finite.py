"""Refusing weights that are not numbers: one NaN makes every answer of a model NaN."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Types that are checked. Integers have no NaN; of FP8 and its scales the quantization method knows what
a code means, and decoded weights are of these types."""


def check_finite(name: str, tensor: Tensor, file: Path) -> None:
    """Refuse a tensor with a NaN or an infinity in it. A bias may have ``-inf``, which masks what it is
    added to, and a single number may be infinite: it is a bound (Gemma 4 stores those of its clipping).

    It costs one pass at the speed of memory: a finite sum has finite terms. Only a sum that is not, which
    may have overflowed, is followed by a look at the smallest and the largest value.

    Raises:
        WeightsError: names the tensor and the file.
    """
    if tensor.dtype not in _FLOATS or bool(torch.isfinite(tensor.sum())):
        return
    low, high = (float(value) for value in torch.aminmax(tensor))
    if tensor.numel() == 1 and not math.isnan(low):
        return
    if math.isfinite(low) and math.isfinite(high):
        return
    if name.rpartition(".")[2].endswith("bias") and low == -math.inf and math.isfinite(high):
        return
    kinds = [
        f"{count} {kind}"
        for count, kind in (
            (int(tensor.isnan().sum()), "NaN"),
            (int(tensor.isinf().sum()), "infinite"),
        )
        if count
    ]
    raise WeightsError(
        f"{file}: tensor {name!r} {list(tensor.shape)} has {' and '.join(kinds)} of {tensor.numel()} "
        "values: weights must be finite (only a bias may have -inf, and a bound of one number any). The "
        "file is damaged, or its training or conversion went wrong"
    )
