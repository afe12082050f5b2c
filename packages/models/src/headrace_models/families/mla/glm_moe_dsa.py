"""GLM-5: latent attention to the tokens that an indexer picks, as in DeepSeek V3.2; layers may attend to
the tokens that a layer before has picked. Mixtures of experts as DeepSeek V3 has them.

The sharing is that of Bai et al. 2026, arXiv:2603.12201.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.attention.token_indexer import (
    IGNORED_INDEXER,
    SharedTopK,
    SparseMLAAttention,
    TokenIndexer,
    indexer_rules,
    indexer_sizes,
)
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import (
    MLA_MOE_RULES,
    MLADecoder,
    grouped_routing,
    is_dense_by_frequency,
)
from headrace_models.layers.decoders.moe import is_dense_by_list
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from headrace_core.model import BuildContext
    from headrace_models.layers.attention.self_attention import SelfAttention

KINDS = {"full": True, "F": True, "shared": False, "S": False}


class GlmMoeDsaForCausalLM(MLADecoder):
    """GLM-5."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *MLA_MOE_RULES,
        *indexer_rules("model.layers.{}.self_attn.indexer", "layers.{}.attention.indexer"),
    )
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.indexer = indexer_sizes(self.settings)
        self.have_indexers = self.indexer_layers()
        self.shared_topk = None if all(self.have_indexers) else SharedTopK()
        if self.shared_topk is not None:
            self.no_stages = "some of its layers attend to what another one's indexer has picked"

    def picks_all(self) -> bool:
        """True if no context is longer than what the indexer picks."""
        return self.context.max_model_len <= self.indexer.top_k

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        ignored = further_layers(self.settings, self.num_layers())
        return {**ignored, **IGNORED_INDEXER} if self.picks_all() else ignored

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        if self.picks_all():
            return super().make_attention(context, index, name)
        return self.mla_attention(
            context,
            name,
            kind=SparseMLAAttention,
            indexer=self.make_indexer(context, f"{name}.indexer")
            if self.have_indexers[index]
            else None,
            shared_topk=self.shared_topk,
        )

    def make_indexer(self, context: BuildContext, name: str) -> TokenIndexer:
        assert self.rotary is not None, "DeepSeek's configs always rotate"
        return TokenIndexer(
            context,
            name,
            self.indexer,
            hidden_size=self.hidden_size(),
            query_rank=self.settings.integer("q_lora_rank"),
            rotary=self.rotary,
            interleaved=self.settings.flag("indexer_rope_interleave", True),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.is_dense(index):
            return super().make_mlp(context, index, name)
        return self.make_mixture(context, name, grouped_routing(self.settings), corrected=True)

    def is_dense(self, index: int) -> bool:
        """By transformers' list, or as V3's configs say."""
        if self.settings.config.get("mlp_layer_types") is None:
            return is_dense_by_frequency(self.settings, index)
        return is_dense_by_list(self.settings, index, 0)

    def indexer_layers(self) -> list[bool]:
        """True for each layer that has an indexer: by a list, by a pattern of letters, or by a step."""
        config, count = self.settings.config, self.num_layers()
        name = next((n for n in ("indexer_types", "index_topk_pattern") if config.get(n)), None)
        if name is None:
            every = max(1, self.settings.integer("index_topk_freq", 1, minimum=0))
            begin = self.settings.integer("index_skip_topk_offset", 2, minimum=0) - 1
            return [max(index - begin, 0) % every == 0 for index in range(count)]
        kinds = config[name]
        known = isinstance(kinds, list | str) and all(
            isinstance(k, str) and k in KINDS for k in kinds
        )
        if not known or len(kinds) != count or not KINDS[kinds[0]]:
            raise UnsupportedModel(
                f"config.json: {name} = {kinds!r:.200}: must be {count} entries out of full and shared "
                "(F and S), the first of them full"
            )
        return [KINDS[kind] for kind in kinds]
