"""``varlen``: attention in both directions without a cache, through core's op.

All sequences of a batch go through one call, told apart by their cumulative lengths: nothing is
padded, and nothing is computed for a longer neighbour's sake.

But towers of media on a CPU with matrix units (AMX), in bfloat16: torch's scaled_dot_product_attention uses
these, headrace's op does not, and is a fifth as fast from a few hundred patches on. There each sequence goes
to torch, or not, by its own length, so that no sequence depends on the others.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_attention.sdpa import attend_alone
from headrace_core.attention import SLIDING_WINDOW, SOFT_CAP, AttentionLayerSpec, EncoderBackend

if TYPE_CHECKING:
    from torch import Tensor


LONG = 64
"""Tokens from which on torch is faster, Python between its calls included (Xeon with AMX, head sizes 64 to
80: 1.8 x at 64, 4.5 x at 256, 6 x at 1024)."""


class VarlenBackend(EncoderBackend):
    """Attention of encoders through ``ops.varlen_attention``."""

    name: ClassVar[str] = "varlen"
    supported_devices = ("cpu", "cuda")
    supported_features = frozenset({SLIDING_WINDOW, SOFT_CAP})

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.EncoderBackend.attend`."""
        plain = distance_bias is None and key_lens is None and not layer.extras
        if plain and max_seqlen >= LONG and _suits_torch(layer, query):
            return self._by_length(layer, query, key, value, cu_seqlens.tolist())
        return self.ops.varlen_attention(
            query,
            key,
            value,
            cu_seqlens,
            max_seqlen=max_seqlen,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            distance_bias=distance_bias,
            key_lens=key_lens,
            **layer.extras,
        )

    def _by_length(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: list[int],
    ) -> Tensor:
        """Long sequences by torch, each run of short ones by the op."""
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        short: list[int] = []
        for begin, end in itertools.pairwise(starts):
            if end - begin < LONG:
                short = [*short, end] if short else [begin, end]
                continue
            self._attend_short(layer, query, key, value, short, output)
            short, rows = [], slice(begin, end)
            output[rows] = attend_alone(layer, query[rows], key[rows], value[rows])
        self._attend_short(layer, query, key, value, short, output)
        return output

    def _attend_short(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: list[int],
        output: Tensor,
    ) -> None:
        """Sequences that follow each other, into their rows of ``output``; none if there are no starts."""
        if not starts:
            return
        rows, cu_seqlens = slice(starts[0], starts[-1]), torch.tensor(starts, dtype=torch.int32)
        output[rows] = self.ops.varlen_attention(
            query[rows],
            key[rows],
            value[rows],
            cu_seqlens - starts[0],
            max_seqlen=int(cu_seqlens.diff().max()),
            scale=layer.scale,
        )


def _suits_torch(layer: AttentionLayerSpec, query: Tensor) -> bool:
    """Towers alone: what else attends in both directions may be part of a captured step."""
    return (
        layer.attention_type == "encoder"
        and not layer.sliding_window
        and query.device.type == "cpu"
        and query.dtype is torch.bfloat16
        and _has_matrix_units()
    )


@functools.cache
def _has_matrix_units() -> bool:
    ask = getattr(torch.cpu, "get_capabilities", None)  # not in all versions that are supported
    return ask is not None and bool(ask().get("amx_bf16"))
