"""GPT-2 and Cerebras-GPT: learned positions, LayerNorm, ungated MLP, transposed weights.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.self_attention import self_attention
from headrace_models.mapping import ALL_PARTS
from headrace_models.settings import MAX_LAYERS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext


def _rules(prefix: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{prefix}wte", "embed"),
        WeightRule(f"{prefix}wpe", "positions"),
        WeightRule(f"{prefix}h.{{}}.ln_1", "layers.{}.input_norm"),
        WeightRule(
            f"{prefix}h.{{}}.attn.c_attn",
            "layers.{}.attention.qkv",
            split=ALL_PARTS,
            transposed=True,
        ),
        WeightRule(f"{prefix}h.{{}}.attn.c_proj", "layers.{}.attention.out", transposed=True),
        WeightRule(f"{prefix}h.{{}}.ln_2", "layers.{}.mlp_norm"),
        WeightRule(f"{prefix}h.{{}}.mlp.c_fc", "layers.{}.mlp.up", transposed=True),
        WeightRule(f"{prefix}h.{{}}.mlp.c_proj", "layers.{}.mlp.down", transposed=True),
        WeightRule(f"{prefix}ln_f", "final_norm"),
    )


class GPT2LMHeadModel(Decoder):
    """The hub's oldest GPT-2 files lack the prefix ``transformer.``."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_rules("transformer."),
        *_rules(""),
        WeightRule("lm_head", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    embedding_name: ClassVar[str] = "transformer.wte"
    blocks_name: ClassVar[str] = "transformer.h"

    def hidden_size(self) -> int:
        return self.settings.integer("n_embd")

    def num_layers(self) -> int:
        return self.settings.integer("n_layer", maximum=MAX_LAYERS)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        num_positions = self.settings.integer("n_positions", 1024)
        if context.max_model_len > num_positions:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most n_positions = "
                f"{num_positions}; learned positions do not extend"
            )
        if self.settings.flag("scale_attn_by_inverse_layer_idx", False):
            raise UnsupportedModel("config.json: scale_attn_by_inverse_layer_idx is not supported")
        name = f"{prefix}transformer.wpe"
        self.positions = Embedding(context, name, num_positions, self.hidden_size())

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        positions = self.positions(batch.positions)
        return self.context.ops.add(self.input_vectors(batch), positions)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        eps = self.settings.number("layer_norm_epsilon", 1e-5)
        return LayerNorm(context, name, self.hidden_size(), eps)

    def make_final_norm(self, context: BuildContext, prefix: str) -> LayerNorm:
        return self.make_norm(context, f"{prefix}transformer.ln_f")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        hidden, heads = self.hidden_size(), self.settings.integer("n_head")
        if hidden % heads:
            raise UnsupportedModel(
                f"config.json: n_embd = {hidden}: must be a multiple of n_head = {heads}"
            )
        scaled = self.settings.flag("scale_attn_weights", True)
        return PreNormBlock(
            self.make_norm(context, f"{name}.ln_1"),
            self_attention(
                context,
                f"{name}.attn",
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=hidden // heads,
                rotary=None,
                scale=None if scaled else 1.0,
                qkv_bias=True,
                out_bias=True,
                qkv_name="c_attn",
                out_name="c_proj",
                part_names=(),
            ),
            self.make_norm(context, f"{name}.ln_2"),
            MLP(
                context,
                f"{name}.mlp.c_fc",
                f"{name}.mlp.c_proj",
                hidden,
                self.settings.optional_integer("n_inner") or 4 * hidden,
                self.settings.activation("activation_function"),
            ),
        )
