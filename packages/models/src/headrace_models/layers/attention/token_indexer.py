"""The lightning indexer: latent attention to the tokens of the context that a small scorer picks.

Letters: T tokens, I heads of the indexer, D their size, P rotated dimensions, k the size of ``topk_indices``.

Beside its latent a layer caches one key of D numbers for each token. A token's I queries ask all keys, a
weight for each head adds the answers up, and attention sees the k best. A score costs I D products
where absorbed attention costs (2 R + P) for each of its heads: 8,192 and 139,264 in DeepSeek V3.2.

Source: DeepSeek-AI 2025, arXiv:2512.02556. Published code turns queries and keys by a Hadamard matrix, which
changes no product, and rounds them to eight bits; here they stay as they are, as in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.attention import MLA, AttentionLayerSpec, AttentionNeed
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import KVCacheSpec, SparseIndexerSpec
from headrace_core.model import WeightRule
from headrace_core.ops.optional.index_tokens import INDEX_TOKENS
from headrace_models.config.settings import MAX_HEAD_DIM, Settings
from headrace_models.layers.attention.mla import MLAAttention, MLASizes
from headrace_models.layers.attention.self_attention import CachedLayer
from headrace_models.layers.base import Part
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

KEY_NORM_EPS = 1e-6
IGNORED_INDEXER: Mapping[str, str] = {
    r"model\.layers\.\d+\.self_attn\.indexer\..*": "picks tokens of longer contexts"
}
"""The weights that a model passes over whose contexts are no longer than what an indexer picks."""


def indexer_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of an indexer whose module is ``source`` in checkpoints."""
    return (
        WeightRule(f"{source}.wq_b", f"{target}.query"),
        WeightRule(f"{source}.wk", f"{target}.key"),
        WeightRule(f"{source}.k_norm", f"{target}.key_norm"),
        WeightRule(f"{source}.weights_proj", f"{target}.weights"),
    )


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """Sizes of an indexer, of a config."""

    num_heads: int
    head_dim: int
    top_k: int


def indexer_sizes(settings: Settings) -> IndexerSizes:
    """The sizes by the keys of DeepSeek V3.2's config."""
    return IndexerSizes(
        num_heads=settings.integer("index_n_heads", 64),
        head_dim=settings.integer("index_head_dim", 128, maximum=MAX_HEAD_DIM),
        top_k=settings.integer("index_topk", 2048),
    )


class TokenIndexer(CachedLayer):
    """One layer's indexer. Every rank has all of it, as each needs the same tokens.

    Args:
        name: of the indexer's module, as the checkpoint spells it.
        rotary: cosines and sines [positions, P], of the first P dimensions.

    Raises:
        UnsupportedModel: heads of fewer dimensions than turn.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: IndexerSizes,
        *,
        hidden_size: int,
        query_rank: int,
        rotary: Tensor,
        interleaved: bool,
    ) -> None:
        self.ops, self.sizes = context.ops, sizes
        self.rotary, self.interleaved = rotary, interleaved
        heads, width = sizes.num_heads, sizes.head_dim
        if width < rotary.shape[1]:
            raise UnsupportedModel(
                f"config.json: index_head_dim = {width}: must be at least {rotary.shape[1]}, the "
                "number of rotated dimensions"
            )
        self.query = Linear(context, f"{name}.wq_b", query_rank, [Part(heads * width)])
        self.key = Linear(context, f"{name}.wk", hidden_size, [Part(width)])
        self.key_norm = LayerNorm(context, f"{name}.k_norm", width, KEY_NORM_EPS)
        self.weights = Linear(context, f"{name}.weights_proj", hidden_size, [Part(heads)])
        self.spec = AttentionLayerSpec(name, heads, 1, width, scale=1.0, latent_dim=width)
        self.kv_spec: KVCacheSpec | None = SparseIndexerSpec(
            context.block_size, 1, width, context.dtype
        )
        # Of the backend only where the cache lies is asked: what scores is an op.
        self.backend = context.attention(
            AttentionNeed(
                head_dim=width,
                dtype=context.dtype,
                kv_cache_dtype="auto",
                block_size=context.block_size,
                device=context.device,
                features=frozenset({MLA}),
            )
        )
        self.index_tokens = context.ops.optional(INDEX_TOKENS)
        self.group = 0
        self.kv_cache: Tensor | None = None

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group

    def __call__(self, x: Tensor, asking: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] and the latent of queries [T, query_rank] -> [T, k], as
        :class:`headrace_core.ops.optional.index_tokens.IndexTokensOp` picks them; unset while memory is
        profiled."""
        query, key = by_heads(self.query(asking), self.sizes.head_dim), self.key_norm(self.key(x))
        weights = self.weights(x)
        self.ops.rotary(
            query, key[:, None], batch.positions, self.rotary, interleaved=self.interleaved
        )
        if self.kv_cache is None or not batch.groups:
            return torch.empty(x.shape[0], self.sizes.top_k, dtype=torch.int32, device=x.device)
        where, turned = batch.groups[self.group], self.rotary.shape[1]
        self.ops.mla_cache_write(
            key[:, :turned], key[:, turned:], self.kv_cache, where.slot_mapping
        )
        return self.index_tokens(
            query,
            weights,
            self.kv_cache,
            where.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            top_k=self.sizes.top_k,
        )


class SharedTopK:
    """``topk_indices`` of the last indexer in this step, for layers behind it that attend to the same."""

    def __init__(self) -> None:
        self.indices: Tensor | None = None


class SparseMLAAttention(MLAAttention):
    """Latent attention to the tokens of ``topk_indices``.

    Other arguments: :class:`~headrace_models.layers.attention.mla.MLAAttention`.

    Args:
        indexer: of this layer; None: it attends to what the layer before does.
        shared_topk: what layers have in common; None: each has an indexer.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MLASizes,
        *,
        indexer: TokenIndexer | None,
        shared_topk: SharedTopK | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(context, name, sizes, sparse=True, **arguments)
        self.indexer, self.shared_topk = indexer, shared_topk

    def topk_indices(self, x: Tensor, asking: Tensor, batch: ForwardBatch) -> Tensor | None:
        if self.indexer is None:
            assert self.shared_topk is not None, (
                "a layer without an indexer shares another's choice"
            )
            return self.shared_topk.indices
        tokens = self.indexer(x, asking, batch)
        if self.shared_topk is not None:
            self.shared_topk.indices = tokens
        return tokens
