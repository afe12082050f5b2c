"""MiniMax-Text-01 and MiniMax-M1: lightning attention, which is linear and forgets at a fixed rate, seven
layers to one of attention, and mixtures of experts. MiniMax 2025, arXiv:2501.08313."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.families.bamba import ATTENTION_RULES, LAYER
from headrace_models.families.llama import LlamaForCausalLM
from headrace_models.families.mixtral import EXPERT_NAMES
from headrace_models.families.moe_rules import expert_rules, router_rules
from headrace_models.layers.decoder import Block
from headrace_models.layers.hybrid_block import Mixer
from headrace_models.layers.lightning_attention import LightningAttention
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe import SparseMoE
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.layers.router import Routing
from headrace_models.mapping import ALL_PARTS
from headrace_models.recurrent_settings import layer_kinds
from headrace_models.rope import by_rotary_dim, rope_settings
from headrace_models.settings import MAX_EXPERTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

MAX_HEADS = 65_536
"""A table of rates has an entry for each."""
_MIXER = f"{LAYER}.self_attn"
_SPELLINGS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
"""How transformers and the published configs begin the names of multipliers."""


class WeighedNormBlock(Block):
    """``h = norm(x); h = a h + b mixer(h); g = norm(h); c g + d mlp(g)``: the norms lie on the stream.

    Args:
        mixer_scales, mlp_scales: a and b, c and d.
    """

    def __init__(
        self,
        ops: OpTable,
        input_norm: NormLayer,
        mixer: Mixer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mixer_scales: tuple[float, float],
        mlp_scales: tuple[float, float],
    ) -> None:
        self.ops = ops
        self.input_norm = input_norm
        self.mixer = mixer
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mixer_scales, self.mlp_scales = mixer_scales, mlp_scales

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        scale = self.ops.scale
        x, _ = self.input_norm.add(x, residual)
        kept, added = self.mixer_scales
        x, _ = self.mlp_norm.add(scale(self.mixer(x, batch), added), scale(x, kept))
        kept, added = self.mlp_scales
        return scale(self.mlp(x), added), scale(x, kept)


class MiniMaxForCausalLM(LlamaForCausalLM):
    """MiniMax-Text-01 in the layout of transformers, and under its own names."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{LAYER}.input_layernorm", "layers.{}.input_norm"),
        *ATTENTION_RULES,
        WeightRule(
            f"{_MIXER}.qkv_proj", "layers.{}.mixer.inputs", split=ALL_PARTS, groups=EACH_KV_HEAD
        ),
        WeightRule(f"{_MIXER}.output_gate", "layers.{}.mixer.gate"),
        WeightRule(f"{_MIXER}.norm", "layers.{}.mixer.norm"),
        WeightRule(f"{_MIXER}.out_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
        *router_rules(f"{LAYER}.block_sparse_moe.gate"),
        *expert_rules(f"{LAYER}.block_sparse_moe.experts", names=EXPERT_NAMES),
        *router_rules(),
        *expert_rules(),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {
        r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)": "follows from the config"
    }
    default_theta: ClassVar[float] = 1_000_000.0
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        """The published config states the number of dimensions that turn."""
        self.settings.refuse("postnorm", True)
        self.settings.refuse("shared_intermediate_size", 0)
        size = self.head_dim()
        limit = self.settings.integer("max_position_embeddings", 4096)
        rope = rope_settings(by_rotary_dim(context.config, size), theta=self.default_theta)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        attends = self.attends(index)
        return WeighedNormBlock(
            context.ops,
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_mixer(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.block_sparse_moe"),
            self._scales("full_attn" if attends else "linear_attn"),
            self._scales("mlp"),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, name)
        return LightningAttention(
            context,
            name,
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads", maximum=MAX_HEADS),
            head_dim=self.head_dim(),
            activation=self.settings.activation("hidden_act"),
            depth=index / (self.num_layers() - 1 + 1e-5),
        )

    def attends(self, index: int) -> bool:
        """Whether the layer's mixer is attention: published configs have a 1 for it."""
        count = self.num_layers()
        marks = self.settings.marks("attn_type_list", count)
        if marks is not None:
            return marks[index]
        known = ("linear_attention", "full_attention")
        kinds = layer_kinds(self.settings, "layer_types", known=known, count=count)
        return index % 2 == 0 if kinds is None else kinds[index] == "full_attention"

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("intermediate_size"),
            routing=Routing(
                num_experts=self.settings.integer("num_local_experts", 8, maximum=MAX_EXPERTS),
                top_k=self.settings.integer("num_experts_per_tok", 2),
                renormalise=True,
            ),
            activation=self.settings.activation("hidden_act"),
            expert_names=EXPERT_NAMES,
        )

    def _scales(self, what: str) -> tuple[float, float]:
        """What the stream and what is added to it are multiplied by."""
        published = _SPELLINGS[what]
        alpha, beta = (
            self.settings.number(
                f"{what}_{which}_factor", self.settings.number(f"{published}_{which}", 1.0)
            )
            for which in ("alpha", "beta")
        )
        return alpha, beta
