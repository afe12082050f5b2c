"""MiniMax-Text-01 and MiniMax-M1: seven layers of lightning attention to one of attention, and mixtures of
experts. MiniMax 2025, arXiv:2501.08313.

Lightning attention is linear attention that forgets at a fixed rate of each head. Qin et al. 2024,
arXiv:2401.04658.

Block: ``h = norm(x); h = a h + b mixer(h); g = norm(h); c g + d experts(g)``, with numbers of the config.

Letters: T tokens, H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.kv import StateShape
from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.recurrent_settings import layer_kinds
from headrace_models.config.rope import by_rotary_dim, rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.heads_norm import WholeRMSNorm
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import by_heads, in_rows
from headrace_models.layers.linear import column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.gated_norm import GatedRMSNorm
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.hybrid import ATTENTION_RULES, LAYER
from headrace_models.loading.rules.moe import EXPERT_NAMES, expert_rules, router_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable

MAX_HEADS = 65_536
"""A table of rates has an entry for each."""
_NORM_EPS = 1e-6
_MIXER = f"{LAYER}.self_attn"
_SPELLINGS = {
    "full_attn": "layernorm_full_attention",
    "linear_attn": "layernorm_linear_attention",
    "mlp": "layernorm_mlp",
}
"""Beginnings of the multipliers' names in transformers and in the published configs."""


class LightningAttention(RecurrentLayer):
    """``out(sigmoid(gate(x)) * norm(attention))`` over activated queries, keys and values. Heads are spread
    over the ranks, which give each other what the norm over all of them needs.

    Args:
        depth: of the layer, from 0 to 1: the deeper, the slower it forgets.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        activation: str,
        depth: float,
    ) -> None:
        shard = dividing_shard(num_heads, context.communicator, what=f"{name}, heads")
        heads = num_heads // shard.count
        size = num_heads * head_dim
        held = StateShape((heads, head_dim, head_dim), "float32")
        super().__init__(context, name, (held,))
        self.ops, self.head_dim, self.activation = context.ops, head_dim, activation
        self.inputs = column_parallel(
            context, f"{name}.qkv_proj", hidden_size, (size,) * 3, units=(num_heads,) * 3
        )
        self.gate = column_parallel(
            context, f"{name}.output_gate", hidden_size, (size,), units=(num_heads,)
        )
        self.norm: GatedRMSNorm | WholeRMSNorm
        if shard.count > 1:
            self.norm = WholeRMSNorm(context, f"{name}.norm", num_heads, head_dim, _NORM_EPS)
        else:
            self.norm = GatedRMSNorm(
                context,
                f"{name}.norm",
                Part(size),
                _NORM_EPS,
                groups=1,
                norm_first=True,
                activation="sigmoid",
            )
        self.out_proj = row_parallel(context, f"{name}.out_proj", size, hidden_size)
        exponents = torch.arange(1, num_heads + 1, dtype=torch.float32)
        slopes = 2.0 ** (-8.0 / num_heads * exponents) * (1 - depth + 1e-5)
        self.rates = -slopes.chunk(shard.count)[shard.index].to(context.device)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        inputs = self.inputs.activated(x, self.activation)
        query, key, value = (by_heads(part, self.head_dim) for part in inputs.chunk(3, -1))
        out = self.ops.state_space_scan(
            value, None, self.rates, key, query, None, *self.state(0, batch)
        )
        return self.out_proj(self.gated(out, self.gate(x)))

    def gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """out [T, H, D] normed, gate [T, H * D] -> [T, H * D]."""
        if isinstance(self.norm, GatedRMSNorm):
            return self.norm(out.flatten(1), gate)
        return self.ops.gate(in_rows(self.norm(out)), gate, activation="sigmoid")


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


class MiniMaxForCausalLM(LlamaDecoder):
    """MiniMax-Text-01 in the layout of transformers, and under its own names."""

    module_names: ClassVar[Sequence[tuple[str, str]]] = ((r"\.mlp\.", ".block_sparse_moe."),)
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
        """True if the layer's mixer is attention: published configs have a 1 for it."""
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
        """Numbers that the stream, and what is added to it, are multiplied by."""
        published = _SPELLINGS[what]
        alpha, beta = (
            self.settings.number(
                f"{what}_{which}_factor", self.settings.number(f"{published}_{which}", 1.0)
            )
            for which in ("alpha", "beta")
        )
        return alpha, beta
