"""Choosing tokens and describing them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import TopLogprobs
from headrace_core.sampling.params import GREEDY_BELOW
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.ops.arguments import describe, dtype_code, int64, matrix, vector


class Sample:
    """See :class:`headrace_core.ops.SampleOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.sample

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
        *,
        keep_filtered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        readable, rows, stride = matrix(logits)
        if keep_filtered and (logits.dtype is not torch.float32 or readable is not logits):
            raise ConfigError(
                f"sample: logits {describe(logits)} cannot keep filtered values; they must be "
                "float32 with rows that are contiguous"
            )
        temperature = vector(temperature, torch.float32, rows, "sample: temperature")
        min_p = vector(min_p, torch.float32, rows, "sample: min_p")
        top_k = vector(top_k, torch.int64, rows, "sample: top_k")
        top_p = vector(top_p, torch.float64, rows, "sample: top_p")
        uniform = vector(uniform, torch.float64, rows, "sample: uniform")
        token_ids = torch.empty(rows, dtype=torch.int64)
        largest = torch.empty(rows)
        self._kernel(
            readable.data_ptr(), temperature.data_ptr(), min_p.data_ptr(), top_k.data_ptr(),
            top_p.data_ptr(), uniform.data_ptr(), token_ids.data_ptr(), largest.data_ptr(), rows,
            _vocabulary(logits), stride, GREEDY_BELOW, keep_filtered, dtype_code(logits.dtype),
        )  # fmt: skip
        return token_ids, largest


class TopLogprobsKernel:
    """See :class:`headrace_core.ops.TopLogprobsOp`.

    Raises:
        IndexError: a token id or a count is outside the vocabulary.
    """

    def __init__(self, library: Library) -> None:
        self._kernel = library.top_logprobs

    def __call__(
        self, logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
    ) -> TopLogprobs:
        logits, rows, stride = matrix(logits)
        vocabulary = _vocabulary(logits)
        token_ids = vector(int64(token_ids), torch.int64, rows, "top_logprobs: token_ids")
        counts = vector(int64(counts), torch.int64, rows, "top_logprobs: counts")
        width = 1 + (int(counts.max()) if rows else 0)
        ids = torch.empty(rows, width, dtype=torch.int64)
        values = torch.empty(rows, width)
        ranks = torch.empty(rows, width, dtype=torch.int64)
        sizes = torch.empty(rows, dtype=torch.int64)
        status = self._kernel(
            logits.data_ptr(), token_ids.data_ptr(), counts.data_ptr(), ids.data_ptr(),
            values.data_ptr(), ranks.data_ptr(), sizes.data_ptr(), rows, vocabulary, stride, width,
            normalize, dtype_code(logits.dtype),
        )  # fmt: skip
        if status:
            raise IndexError(f"top_logprobs: a token id or count is outside {vocabulary} tokens")
        return TopLogprobs(ids, values, ranks, sizes)


def _vocabulary(logits: Tensor) -> int:
    """Width of the logits, which ids of 32 bits must be able to count."""
    width = logits.shape[1]
    if not 0 < width < 2**31 - 2**10:
        raise ConfigError(f"logits are {describe(logits)}; at least one token, fewer than 2^31")
    return width
