"""DeciLM and Nemotron-NAS (Llama-Nemotron Super and Ultra): Llama whose layers differ in their heads and
sizes, some without attention or without an MLP.

Bercovich et al. 2024, arXiv:2411.19146.

Block: Llama's, in which either half may lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

_ROUNDED_TO = 256
"""Sizes of MLPs that follow from a factor are multiples of this."""


class PartialBlock(Block):
    """A pre-norm block that may lack a half, with its norm."""

    def __init__(
        self,
        input_norm: NormLayer | None,
        attention: SelfAttention | None,
        mlp_norm: NormLayer | None,
        mlp: MLPLayer | None,
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        if self.input_norm is not None and self.attention is not None:
            x, residual = self.input_norm.add(x, residual)
            x = self.attention(x, batch)
        if self.mlp_norm is not None and self.mlp is not None:
            x, residual = self.mlp_norm.add(x, residual)
            x = self.mlp(x)
        return x, residual


class DeciLMForCausalLM(LlamaDecoder):
    """Layers are described by ``block_configs``, or their key-value heads by
    ``num_key_value_heads_per_layer`` (DeciLM 7B)."""

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        norm, attention, mlp_norm, mlp = None, None, None, None
        if not self.is_left_out(index, "attention"):
            norm = self.make_norm(context, f"{name}.input_layernorm")
            attention = self.make_attention(context, index, f"{name}.self_attn")
        if not self.is_left_out(index, "ffn"):
            mlp_norm = self.make_norm(context, f"{name}.post_attention_layernorm")
            mlp = self.make_mlp(context, index, f"{name}.mlp")
        return PartialBlock(norm, attention, mlp_norm, mlp)

    def described(self, index: int, half: str) -> Settings:
        """The config's entry for a layer's ``attention`` or ``ffn``; empty if it says nothing.

        Raises:
            UnsupportedModel: no such description, or a plain matrix in the half's place.
        """
        blocks = self.settings.config.get("block_configs")
        if blocks is None:
            return Settings({})
        layers = self.num_layers()
        if not isinstance(blocks, list) or len(blocks) != layers:
            raise UnsupportedModel(
                f"config.json: block_configs: must be a list of {layers} objects"
            )
        block = blocks[index]
        found: Any = block.get(half) if isinstance(block, Mapping) else None
        if not isinstance(found, Mapping):
            raise UnsupportedModel(f"config.json: block_configs[{index}] has no object {half!r}")
        settings = Settings(found)
        settings.refuse("replace_with_linear", False)
        settings.refuse("sparsify")
        for name in ("window_length", "num_sink_tokens"):
            settings.refuse(name)
        return settings

    def is_left_out(self, index: int, half: str) -> bool:
        return self.described(index, half).flag("no_op", False)

    def num_kv_heads(self, index: int) -> int:
        """Raises: UnsupportedModel: query heads cannot be shared out over them."""
        heads = self.settings.integer("num_attention_heads")
        each = self.described(index, "attention").optional_integer("n_heads_in_group")
        listed = "num_key_value_heads_per_layer"
        if each is not None:
            found = heads / each
        elif self.settings.config.get(listed) is not None:
            found = self.settings.integers(listed, self.num_layers())[index]
        else:
            found = self.settings.num_kv_heads()
        if found < 1 or found != int(found) or heads % found:
            raise UnsupportedModel(
                f"config.json: layer {index} has {found:g} key-value heads: must be a divisor of "
                f"num_attention_heads = {heads}"
            )
        return int(found)

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        kv_heads = self.num_kv_heads(index)
        return self.attention(context, name, num_kv_heads=kv_heads, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.intermediate_size(index),
            self.settings.activation("hidden_act"),
            bias=self.settings.flag("mlp_bias", False),
        )

    def intermediate_size(self, index: int) -> int:
        own = self.described(index, "ffn")
        factor = own.optional_positive("ffn_mult")
        if factor is None:
            size = own.optional_integer("intermediate_size")
            return size or self.settings.integer("intermediate_size")
        size = int(2 * factor * self.hidden_size() / 3)
        return -(-size // _ROUNDED_TO) * _ROUNDED_TO
