"""Models that compute what Llama does and store it under other names, from before transformers had a
class for each: their code is in their repositories, and none of it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


@dataclass(frozen=True, slots=True)
class Names:
    """The checkpoint's names of modules; Llama's own by default. Those of a block's pieces come after
    the block's own, those of the projections after the attention's or the MLP's."""

    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names of query, key and value, or of all three together."""
    out: str = "o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Names of the gate and what it lets through, or of both together."""
    down: str = "down_proj"

    def rules(self, *, groups: int = 1) -> tuple[WeightRule, ...]:
        """From these names to Llama's layers. ``groups``: :class:`WeightRule`'s, of a fused query, key
        and value."""
        block = f"{self.blocks}.{{}}"
        attention, mlp = f"{block}.{self.attention}", f"{block}.{self.mlp}"
        return (
            WeightRule(self.embedding, "embed"),
            WeightRule(f"{block}.{self.input_norm}", "layers.{}.input_norm"),
            *_parts(attention, self.qkv, "layers.{}.attention.qkv", groups),
            WeightRule(f"{attention}.{self.out}", "layers.{}.attention.out"),
            WeightRule(f"{block}.{self.mlp_norm}", "layers.{}.mlp_norm"),
            *_parts(mlp, self.gate_up, "layers.{}.mlp.gate_up", 1),
            WeightRule(f"{mlp}.{self.down}", "layers.{}.mlp.down"),
            WeightRule(self.final_norm, "final_norm"),
            WeightRule(self.head, "head"),
        )


def _parts(module: str, names: tuple[str, ...], target: str, groups: int) -> list[WeightRule]:
    """One rule for each name, or for all parts in one tensor."""
    if len(names) == 1:
        return [WeightRule(f"{module}.{names[0]}", target, split=ALL_PARTS, groups=groups)]
    return [WeightRule(f"{module}.{name}", target, part) for part, name in enumerate(names)]


class RenamedLlama(LlamaDecoder):
    """Llama's blocks under :attr:`names`."""

    names: ClassVar[Names]

    def __init_subclass__(cls) -> None:
        """Set the names that every decoder is asked for."""
        if "names" in vars(cls):
            cls.embedding_name, cls.blocks_name = cls.names.embedding, cls.names.blocks
            cls.head_name = cls.names.head

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.{self.names.input_norm}"),
            self.make_attention(context, index, f"{name}.{self.names.attention}"),
            self.make_norm(context, f"{name}.{self.names.mlp_norm}"),
            self.make_mlp(context, index, f"{name}.{self.names.mlp}"),
        )

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}{self.names.final_norm}")

    def attention(self, context: BuildContext, name: str, **differences: Any) -> SelfAttention:
        qkv, fused = self.names.qkv, len(self.names.qkv) == 1
        spelled = {
            "qkv_name": qkv[0] if fused else "qkv_proj",
            "part_names": () if fused else qkv,
            "out_name": self.names.out,
        }
        return super().attention(context, name, **{**spelled, **differences})

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return self.mlp(context, name, bias=self.settings.flag("mlp_bias", False))

    def mlp(self, context: BuildContext, name: str, **differences: Any) -> MLPLayer:
        """A layer of the config's sizes; ``differences`` are further arguments of :class:`GatedMLP`."""
        parts = self.names.gate_up
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.intermediate_size(),
            self.settings.activation("hidden_act", default="silu"),
            stored_fused=len(parts) == 1,
            fused_name=parts[0] if len(parts) == 1 else "gate_up_proj",
            part_names=parts,
            down_name=self.names.down,
            **differences,
        )

    def intermediate_size(self) -> int:
        return self.settings.integer("intermediate_size")
