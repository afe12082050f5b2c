"""The language model of Molmo: Qwen2, or OLMo 2, under names of its own.

Deitke et al. 2024, arXiv:2409.17146. The blocks of 7B-D and 72B are Qwen2's, those of 7B-O OLMo 2's
(``norm_after``). ``intermediate_size`` counts gate and up together, and up is stored first. Behind the
head's tokens are further ones that mark images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PostNormBlock, PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder, whole_norms
from headrace_models.layers.decoders.unheard_tokens import EmbeddingInTwo, ShortHead
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_WHOLE = "model.transformer"
_BLOCK = f"{_WHOLE}.blocks.{{}}"


class MolmoTextForCausalLM(LlamaDecoder):
    """Molmo 7B-D, 7B-O and 72B without their eyes."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_WHOLE}.wte", "embed"),
        WeightRule(f"{_BLOCK}.attn_norm", "layers.{}.input_norm"),
        WeightRule(f"{_BLOCK}.attn_norm", "layers.{}.attention_out_norm"),
        WeightRule(f"{_BLOCK}.att_proj", "layers.{}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_BLOCK}.q_norm", "layers.{}.attention.query_norm"),
        WeightRule(f"{_BLOCK}.k_norm", "layers.{}.attention.key_norm"),
        WeightRule(f"{_BLOCK}.attn_out", "layers.{}.attention.out"),
        WeightRule(f"{_BLOCK}.ff_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_BLOCK}.ff_norm", "layers.{}.mlp_out_norm"),
        WeightRule(f"{_BLOCK}.ff_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS, order=(1, 0)),
        WeightRule(f"{_BLOCK}.ff_out", "layers.{}.mlp.down"),
        WeightRule(f"{_WHOLE}.ln_f", "final_norm"),
        WeightRule(f"{_WHOLE}.ff_out", "head"),
    )
    embedding_name: ClassVar[str] = f"{_WHOLE}.wte"
    blocks_name: ClassVar[str] = f"{_WHOLE}.blocks"
    head_name: ClassVar[str] = f"{_WHOLE}.ff_out"
    default_eps: ClassVar[float] = 1e-5
    spelling: ClassVar[Spelling] = {"rms_norm_eps": ("layer_norm_eps",)}

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("layer_norm_type", "rms")
        self.settings.refuse("weight_tying", False)
        self.settings.refuse("clip_qkv")
        super().prepare(context, prefix)

    def is_tied(self) -> bool:
        return False

    def make_embedding(self, context: BuildContext, prefix: str) -> EmbeddingInTwo:
        answers, every = self._tokens()
        rows = answers, every - answers
        return EmbeddingInTwo(context, self.embedding_name, rows, self.hidden_size())

    def make_head(self, context: BuildContext, prefix: str) -> None:
        self.head = ShortHead(context, self.head_name, self._tokens(), self.hidden_size())

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{_WHOLE}.ln_f")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        attention = self.make_attention(context, index, name)
        mlp = self.make_mlp(context, index, name)
        norms = [self.make_norm(context, f"{name}.{of}_norm") for of in ("attn", "ff")]
        if self.settings.flag("norm_after", False):
            return PostNormBlock(context.ops, attention, norms[0], mlp, norms[1])
        return PreNormBlock(norms[0], attention, norms[1], mlp)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        normed = self.settings.flag("attention_layer_norm", False)
        return self.attention(
            context,
            name,
            qkv_bias=self.settings.flag("qkv_bias", False),
            qkv_name="att_proj",
            part_names=(),
            out_name="attn_out",
            **(whole_norms(self, context, name) if normed else {}),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        both = self.settings.integer("intermediate_size", minimum=2)
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            both // 2,
            "silu",
            stored_fused=True,
            fused_name="ff_proj",
            down_name="ff_out",
        )

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
