"""The shape of the GPTs: LayerNorm, an MLP without gate, and names that differ from model to model.

A family says the names, how its config.json spells the usual keys, and which method does otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.layers.attention.selection import self_attention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.norm import LayerNorm, NoNorm, NormLayer
from headrace_models.layers.positions import FixedPositions, LearnedPositions
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.config.settings import Settings

GPT2_KEYS = {
    "hidden_size": ("n_embd",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner",),
    "hidden_act": ("activation_function",),
    "max_position_embeddings": ("n_positions",),
    "layer_norm_eps": ("layer_norm_epsilon",),
}
"""Spellings of the usual keys in GPT-2's config.json and those of its kin."""


@dataclass(frozen=True, slots=True)
class Names:
    """The checkpoint's names of modules. Those of a block's pieces come after the block's own, those of
    the projections after the attention's."""

    embedding: str
    blocks: str
    final_norm: str
    head: str
    input_norm: str
    attention: str
    out: str
    up: str
    down: str
    qkv: tuple[str, ...]
    """Names of query, key and value, or of all three together."""
    mlp_norm: str = ""
    """Empty: both halves read one norm."""
    positions: str = ""
    """Name of the table of learned positions."""

    def rules(
        self, *, groups: int = 1, order: tuple[int, ...] = (), transposed: bool = False
    ) -> tuple[WeightRule, ...]:
        """From these names to :class:`GPTDecoder`. Arguments: :class:`WeightRule`'s, of the fused
        projection; transposed are all of a block's."""
        block, attention = f"{self.blocks}.{{}}", f"{self.blocks}.{{}}.{self.attention}"
        qkv = [
            WeightRule(f"{attention}.{name}", "layers.{}.attention.qkv", part=part)
            for part, name in enumerate(self.qkv)
        ]
        if len(self.qkv) == 1:
            source, target = qkv[0].source, qkv[0].target
            qkv = [WeightRule(source, target, 0, ALL_PARTS, transposed, order, groups)]
        return (
            WeightRule(self.embedding, "embed"),
            *([WeightRule(self.positions, "positions")] if self.positions else []),
            WeightRule(f"{block}.{self.input_norm}", "layers.{}.input_norm"),
            *qkv,
            WeightRule(f"{attention}.{self.out}", "layers.{}.attention.out", transposed=transposed),
            *(
                [WeightRule(f"{block}.{self.mlp_norm}", "layers.{}.mlp_norm")]
                if self.mlp_norm
                else []
            ),
            WeightRule(f"{block}.{self.up}", "layers.{}.mlp.up", transposed=transposed),
            WeightRule(f"{block}.{self.down}", "layers.{}.mlp.down", transposed=transposed),
            WeightRule(self.final_norm, "final_norm"),
            WeightRule(self.head, "head"),
        )


class GPTDecoder(Decoder):
    """Pre-norm blocks over learned positions, computed ones, rotary ones or none."""

    names: ClassVar[Names]
    default_theta: ClassVar[float] = 10_000.0
    default_partial_rotary: ClassVar[float] = 1.0
    default_eps: ClassVar[float] = 1e-5
    default_activation: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        """Set the names that every decoder is asked for."""
        if "names" in vars(cls):
            cls.embedding_name, cls.blocks_name = cls.names.embedding, cls.names.blocks
            cls.head_name = cls.names.head

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.positions = self.make_positions(context, prefix)
        self.rotary = self.make_rotary(context)

    def make_positions(
        self, context: BuildContext, prefix: str
    ) -> LearnedPositions | FixedPositions | None:
        """Positions that are added to the tokens' vectors."""
        return None

    def make_rotary(self, context: BuildContext) -> Tensor | None:
        """Table that query and key are turned by."""
        return None

    def learned_positions(
        self, context: BuildContext, prefix: str, *, default: int, skip: int = 0
    ) -> LearnedPositions:
        """Arguments: ``default`` of ``max_position_embeddings``; others: :class:`LearnedPositions`."""
        key = "max_position_embeddings"
        return LearnedPositions(
            context,
            f"{prefix}{self.names.positions}",
            self.settings.integer(key, default),
            self.hidden_size(),
            key=self.settings.spelled.get(key, key),
            skip=skip,
        )

    def rotary_of_config(self, context: BuildContext) -> Tensor:
        """The table that the config asks for."""
        rope = rope_settings(
            self.settings.config, theta=self.default_theta, partial=self.default_partial_rotary
        )
        limit = self.settings.integer("max_position_embeddings", 2048)
        return rotary_table(context, rope, self.settings.head_dim(), max_positions=limit)

    def rotary_of_dimensions(self, context: BuildContext) -> Tensor:
        """The table of a config that says how many dimensions turn (``rotary_dim``), not which share."""
        head_dim = self.settings.head_dim()
        turning = self.settings.integer("rotary_dim", min(64, head_dim), maximum=head_dim)
        rope = replace(rope_settings(self.settings.config), partial_rotary_factor=1.0)
        return rotary_table(context, rope, turning)

    def embed_tokens(self, batch: ForwardBatch) -> Tensor:
        vectors = self.input_vectors(batch)
        if self.positions is None:
            return vectors
        return self.context.ops.add(vectors, self.positions(batch.positions))

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_norm(context, f"{name}.{self.names.mlp_norm}"),
            self.make_mlp(context, index, name),
        )

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        """A norm of the stream."""
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps())

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_eps", self.default_eps)

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer | NoNorm:
        return self.make_norm(context, f"{prefix}{self.names.final_norm}")

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name, qkv_bias=True, out_bias=True)

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        """A layer of the config's sizes; ``differences`` are further arguments of `SelfAttention`."""
        fused = len(self.names.qkv) == 1
        arguments = {
            "hidden_size": self.hidden_size(),
            "num_heads": self.settings.integer("num_attention_heads"),
            "num_kv_heads": self.num_kv_heads(),
            "head_dim": self.settings.head_dim(),
            "rotary": self.rotary,
            "qkv_name": self.names.qkv[0] if fused else "qkv_proj",
            "part_names": () if fused else self.names.qkv,
            "out_name": self.names.out,
            **differences,
        }
        return self_attention(context, name, **arguments)

    def num_kv_heads(self) -> int:
        return self.settings.num_kv_heads()

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name)

    def mlp(self, context: BuildContext, name: str, *, bias: bool = True) -> MLPLayer:
        """A layer of the config's sizes in the block ``name``."""
        return MLP(
            context,
            f"{name}.{self.names.up}",
            f"{name}.{self.names.down}",
            self.hidden_size(),
            self.settings.integer("intermediate_size", 4 * self.hidden_size()),
            self.activation(),
            bias=bias,
        )

    def activation(self) -> str:
        return self.settings.activation("hidden_act", default=self.default_activation)


GPT2_NAMES = Names(
    embedding="transformer.wte",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    head="lm_head",
    input_norm="ln_1",
    attention="attn",
    qkv=("c_attn",),
    out="c_proj",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    positions="transformer.wpe",
)
"""GPT-2's names of modules, which its kin change in part."""


def without_prefix(rules: Sequence[WeightRule], prefix: str = "transformer.") -> list[WeightRule]:
    """The rules of names with a prefix, for names that lack it."""
    return [
        replace(rule, source=rule.source.removeprefix(prefix))
        for rule in rules
        if rule.source.startswith(prefix)
    ]


def gpt2_score_scale(settings: Settings, index: int) -> float:
    """Number that GPT-2 and its kin multiply the scores of layer ``index`` by."""
    scaled = settings.flag("scale_attn_weights", True)
    scale = settings.head_dim() ** -0.5 if scaled else 1.0
    by_layer = settings.flag("scale_attn_by_inverse_layer_idx", False)
    return scale / (index + 1) if by_layer else scale
