"""Jais 1: GPT-2 with ALiBi instead of positions, a gated MLP, and the multipliers of µP.

Sengupta et al. 2023, arXiv:2308.16149.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings, Spelling
from headrace_models.layers.attention.alibi import alibi_slopes
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.gpt import (
    GPT2_KEYS,
    GPT2_NAMES,
    GPTDecoder,
    Names,
    gpt2_score_scale,
    without_prefix,
)
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.positions import LearnedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

RULES = (
    *GPT2_NAMES.rules(transposed=True),
    WeightRule("transformer.h.{}.mlp.c_fc2", "layers.{}.mlp.gate_up", part=0, transposed=True),
    WeightRule("transformer.h.{}.mlp.c_fc", "layers.{}.mlp.gate_up", part=1, transposed=True),
)


class JAISLMHeadModel(GPTDecoder):
    """Jais 13B and 30B, and the Jais family trained from scratch.

    Their configs have µP's numbers under two sets of names. Blocks are
    :class:`~headrace_models.layers.blocks.PreNormBlock`.
    """

    names: ClassVar[Names] = GPT2_NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = (*RULES, *without_prefix(RULES))
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r"(transformer\.)?relative_pe\.slopes": "follow from the number of heads"
    }
    spelling: ClassVar[Spelling] = {
        **GPT2_KEYS,
        "embeddings_scale": ("mup_embeddings_scale",),
        "scale_qk_dot_by_d": ("mup_scale_qk_dot_by_d",),
    }

    ties_embeddings: ClassVar[bool] = True

    def has_alibi(self) -> bool:
        self.settings.refuse("position_embedding_type", "alibi", "learned")
        return self.settings.config.get("position_embedding_type") == "alibi"

    def make_positions(self, context: BuildContext, prefix: str) -> LearnedPositions | None:
        if self.has_alibi():
            return None
        return self.learned_positions(context, prefix, default=1024)

    def token_vectors(self, ids: Tensor) -> Tensor:
        multiplier = self.settings.number("embeddings_scale", 1.0)
        return self.context.ops.scale(self.embed(ids), multiplier)

    def logits_multiplier(self) -> float:
        number = self.settings.number
        by_parts = number("mup_output_alpha", 1.0) * number("mup_width_scale", 1.0)
        return number("width_scale", by_parts)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        heads = self.settings.integer("num_attention_heads")
        slopes = alibi_slopes(heads) / self.stretch(context) if self.has_alibi() else None
        scale = self.score_scale(index)
        return self.attention(
            context, name, scale=scale, alibi_slopes=slopes, qkv_bias=True, out_bias=True
        )

    def stretch(self, context: BuildContext) -> float:
        """Divisor of distances. Published is a number, or a length beyond which that would
        follow each request's.

        Raises:
            UnsupportedModel: contexts may be longer than that length.
        """
        stated = self.settings.config.get("alibi_scaling")
        if stated is None:
            return 1.0
        own = Settings(stated if isinstance(stated, Mapping) else {})
        own.refuse("type", "linear")
        if own.config.get("factor") is not None:
            return own.positive("factor")
        if context.max_model_len > own.integer("train_seq_len"):
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most alibi_scaling's "
                f"train_seq_len = {own.integer('train_seq_len')}: distances that are divided as each "
                "request grows are not supported"
            )
        return 1.0

    def score_scale(self, index: int) -> float:
        """µP divides by the size of a head, not by its root."""
        scale = gpt2_score_scale(self.settings, index)
        by_size = self.settings.flag("scale_qk_dot_by_d", False)
        return scale * self.settings.head_dim() ** -0.5 if by_size else scale

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if self.settings.config.get("hidden_act") != "swiglu":
            return super().make_mlp(context, index, name)
        return GatedMLP(
            context,
            f"{name}.mlp",
            self.hidden_size(),
            self.settings.integer("intermediate_size", 4 * self.hidden_size()),
            "silu",
            bias=True,
            part_names=("c_fc2", "c_fc"),
            down_name="c_proj",
        )
