"""Slopes of ALiBi: a head's scores fall by one for each token that a key lies back.

Press et al. 2021, arXiv:2108.12409.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import MAX_HEADS


def alibi_slopes(num_heads: int) -> Tensor:
    """[num_heads] float32, as the authors' code has them.

    A geometric series for the largest power of two that there are heads for; the other heads get every
    second number of the series for twice as many.

    Raises:
        UnsupportedModel: more than :data:`~headrace_models.config.settings.MAX_HEADS`.
    """
    _check(num_heads)
    power = 2 ** (num_heads.bit_length() - 1)
    return torch.cat((_series(power, 8.0), _series(2 * power, 8.0)[::2][: num_heads - power]))


def alibi_slopes_around(num_heads: int, largest: float) -> Tensor:
    """[num_heads] float32, as MPT has them: of the series for the next power of two first every second
    number, then the others. ``largest`` is the last exponent of 1/2 (``alibi_bias_max``).

    Raises:
        UnsupportedModel: more than :data:`~headrace_models.config.settings.MAX_HEADS`.
    """
    _check(num_heads)
    power = 2 ** (num_heads - 1).bit_length()
    series = _series(power, largest)
    if power == num_heads:
        return series
    return torch.cat((series[1::2], series[::2]))[:num_heads]


def _check(num_heads: int) -> None:
    if num_heads > MAX_HEADS:
        raise UnsupportedModel(
            f"config.json: {num_heads} heads with ALiBi: must be at most {MAX_HEADS}"
        )


def _series(count: int, largest: float) -> Tensor:
    """2 to the power of -largest * i / count, i from 1 to count."""
    return 2.0 ** (torch.arange(1, count + 1, dtype=torch.float32) * (-largest / count))
