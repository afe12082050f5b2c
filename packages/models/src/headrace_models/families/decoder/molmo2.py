"""The language model of Molmo 2: Qwen3, or OLMo 3 without windows, under names of its own.

Ai2 2025, Molmo 2. Up is stored in front of gate. Behind the head's tokens are further ones that mark images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PostNormBlock, PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder, whole_norms
from headrace_models.layers.decoders.unheard_tokens import EmbeddingInTwo, ShortHead
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_WHOLE = "model.transformer"
_BLOCK = f"{_WHOLE}.blocks.{{}}"
_BY_HEAD, _WHOLE_NORMS = "qwen3", "olmo"
"""Values of ``qk_norm_type``."""


class Molmo2TextForCausalLM(LlamaDecoder):
    """Molmo2-4B, -8B and -O-7B without their eyes."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_WHOLE}.wte", "embed"),
        WeightRule(f"{_BLOCK}.attn_norm", "layers.{}.input_norm"),
        WeightRule(f"{_BLOCK}.attn_norm", "layers.{}.attention_out_norm"),
        WeightRule(f"{_BLOCK}.self_attn.att_proj", "layers.{}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_BLOCK}.self_attn.q_norm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_BLOCK}.self_attn.k_norm", "layers.{}.attention.key_norm"),
        WeightRule(f"{_BLOCK}.self_attn.attn_out", "layers.{}.attention.out"),
        WeightRule(f"{_BLOCK}.ff_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_BLOCK}.ff_norm", "layers.{}.mlp_out_norm"),
        WeightRule(f"{_BLOCK}.mlp.ff_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS, order=(1, 0)),
        WeightRule(f"{_BLOCK}.mlp.ff_out", "layers.{}.mlp.down"),
        WeightRule(f"{_WHOLE}.ln_f", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    embedding_name: ClassVar[str] = f"{_WHOLE}.wte"
    blocks_name: ClassVar[str] = f"{_WHOLE}.blocks"
    spelling: ClassVar[Spelling] = {
        "rms_norm_eps": ("layer_norm_eps",),
        "attention_bias": ("qkv_bias",),
    }

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("use_qk_norm", True)
        super().prepare(context, prefix)
        count = self.settings.integer("num_hidden_layers")
        scaled = self.settings.config.get("rope_scaling_layers")
        self.scaled = set(range(count) if scaled is None else self._layers(scaled, count))
        theta = rope_settings(self.settings.config, theta=self.default_theta).theta
        plain = rope_settings({"rope_theta": theta})
        self.plain_rotary = rotary_table(
            context, plain, self.head_dim(), length=self.num_places(context)
        )

    def is_tied(self) -> bool:
        return False

    def make_embedding(self, context: BuildContext, prefix: str) -> EmbeddingInTwo:
        answers, every = self._tokens()
        rows = answers, every - answers
        return EmbeddingInTwo(context, self.embedding_name, rows, self.hidden_size())

    def make_head(self, context: BuildContext, prefix: str) -> None:
        self.head = ShortHead(context, "lm_head", self._tokens(), self.hidden_size())

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{_WHOLE}.ln_f")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        attention = self.make_attention(context, index, f"{name}.self_attn")
        mlp = self.make_mlp(context, index, f"{name}.mlp")
        norms = [self.make_norm(context, f"{name}.{of}_norm") for of in ("attn", "ff")]
        if self.settings.flag("norm_after", False):
            return PostNormBlock(context.ops, attention, norms[0], mlp, norms[1])
        return PreNormBlock(norms[0], attention, norms[1], mlp)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        norm = self.settings.choice("qk_norm_type", (_BY_HEAD, _WHOLE_NORMS), _BY_HEAD)
        norms: dict[str, Any] = {"head_norm_eps": self.norm_eps()}
        if norm == _WHOLE_NORMS:
            norms = whole_norms(self, context, name)
        return self.attention(
            context,
            name,
            rotary=self.rotary if index in self.scaled else self.plain_rotary,
            qkv_bias=self.settings.flag("attention_bias", False),
            qkv_name="att_proj",
            part_names=(),
            out_name="attn_out",
            **norms,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act"),
            stored_fused=True,
            fused_name="ff_proj",
            down_name="ff_out",
        )

    def _layers(self, stated: object, count: int) -> Sequence[int]:
        if not isinstance(stated, list) or not all(
            type(index) is int and 0 <= index < count for index in stated
        ):
            raise UnsupportedModel(
                f"config.json: rope_scaling_layers = {stated!r:.200}: must be numbers of the {count} layers"
            )
        return stated

    def _tokens(self) -> tuple[int, int]:
        """Those that may be answers, and all."""
        answers = self.settings.integer("embedding_size")
        every = self.settings.integer("vocab_size")
        if every <= answers:
            raise UnsupportedModel(
                f"config.json: vocab_size = {every}: must count the {answers} tokens of embedding_size and "
                "those that mark images"
            )
        return answers, every
