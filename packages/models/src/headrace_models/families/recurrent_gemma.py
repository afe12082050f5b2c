"""RecurrentGemma: two linear recurrences to one layer of attention within a window. Botev et al. 2024,
arXiv:2404.07839."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.families.bamba import LAYER
from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.layers.attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.hybrid_block import HybridBlock, Mixer
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.rg_lru import GriffinMixer
from headrace_models.recurrent_settings import MAX_TAPS, repeated_kinds

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MIXER, _MLP = f"{LAYER}.temporal_block", f"{LAYER}.mlp_block"
_PATTERN = ("recurrent", "recurrent", "attention")


class RecurrentGemmaForCausalLM(LlamaForCausalLM):
    """RecurrentGemma 2B and 9B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.temporal_pre_norm", "layers.{}.input_norm"),
        WeightRule(f"{_MIXER}.q_proj", "layers.{}.mixer.qkv", part=0),
        WeightRule(f"{_MIXER}.k_proj", "layers.{}.mixer.qkv", part=1),
        WeightRule(f"{_MIXER}.v_proj", "layers.{}.mixer.qkv", part=2),
        WeightRule(f"{_MIXER}.o_proj", "layers.{}.mixer.out"),
        WeightRule(f"{_MIXER}.linear_y", "layers.{}.mixer.branch"),
        WeightRule(f"{_MIXER}.linear_x", "layers.{}.mixer.inputs"),
        WeightRule(f"{_MIXER}.conv_1d", "layers.{}.mixer.conv"),
        WeightRule(f"{_MIXER}.rg_lru", "layers.{}.mixer.recurrence"),
        WeightRule(f"{_MIXER}.linear_out", "layers.{}.mixer.out"),
        WeightRule(f"{LAYER}.channel_pre_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_MLP}.gate_proj", "layers.{}.mlp.gate_up", part=0),
        WeightRule(f"{_MLP}.up_proj", "layers.{}.mlp.gate_up", part=1),
        WeightRule(f"{_MLP}.down_proj", "layers.{}.mlp.down"),
        WeightRule("model.final_norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    default_partial_rotary: ClassVar[float] = 0.5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        # The factor was bfloat16 in training.
        self.embedding_scale = float(torch.tensor(self.hidden_size() ** 0.5).bfloat16())

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.embedding_scale)

    def logits_soft_cap(self) -> float | None:
        return self.settings.positive("logits_soft_cap", 30.0)

    def make_norm(self, context: BuildContext, name: str) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=1.0)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}model.final_norm")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return HybridBlock(
            self.make_norm(context, f"{name}.temporal_pre_norm"),
            self.make_mixer(context, index, f"{name}.temporal_block"),
            self.make_norm(context, f"{name}.channel_pre_norm"),
            self.make_mlp(context, index, f"{name}.mlp_block"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        pattern = repeated_kinds(self.settings, "block_types", _PATTERN)
        if pattern[index % len(pattern)] == "attention":
            return self.make_attention(context, index, name)
        hidden = self.hidden_size()
        return GriffinMixer(
            context,
            name,
            hidden_size=hidden,
            channels=self.settings.integer("lru_width", hidden),
            num_blocks=self.settings.integer("num_attention_heads"),
            taps=self.settings.integer("conv1d_width", 4, minimum=2, maximum=MAX_TAPS),
            activation=self.activation(),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context,
            name,
            sliding_window=self.settings.integer("attention_window_size", 2048),
            qkv_bias=self.settings.flag("attention_bias", False),
            out_bias=True,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        """The config's size is that of gate and up together."""
        inner = self.settings.integer("intermediate_size", minimum=2) // 2
        return GatedMLP(context, name, self.hidden_size(), inner, self.activation(), bias=True)

    def activation(self) -> str:
        return self.settings.activation("hidden_activation", default="gelu_pytorch_tanh")
