"""``index_tokens``: the tokens that sparse MLA attends to (DeepSeek V3.2, GLM-5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class IndexTokensOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        weights: Tensor,
        cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        top_k: int,
    ) -> Tensor:
        """The ``top_k`` tokens of a request that each of its new tokens is to attend to.

        query [T, Hq, D] (may be a strided slice), weights [T, Hq] of the same dtype, cache [N, S, D] with
        this step's keys in it; the rest as :class:`headrace_core.ops.PagedAttentionOp`. For a token the
        key j of its request, up to its own, scores ``sum_h weights[h] * max(0, query[h] . key_j)``, and of
        equal scores the earlier key is the better one.

        Returns [T, top_k] int32: the positions of the best, ascending, and -1 behind them where there are
        fewer; rows past ``cu_seqlens_q[-1]`` are -1. Source: the lightning indexer of DeepSeek-AI 2025,
        arXiv:2512.02556.
        """


INDEX_TOKENS: OptionalOp[IndexTokensOp] = OptionalOp("index_tokens")
