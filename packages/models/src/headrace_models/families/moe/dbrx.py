"""DBRX: LayerNorms without biases, clamped queries, keys and values, sixteen experts in runs of rows.

Databricks 2024, DBRX. The config keeps attention's and the experts' settings in blocks of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_EXPERTS, Settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.norm import LayerNorm
from headrace_models.loading.mapping import ALL_PARTS
from headrace_models.loading.rules.moe import router_rules

if TYPE_CHECKING:
    from headrace_core.model import BuildContext

_BLOCK = "transformer.blocks.{}"
_MIXED = f"{_BLOCK}.norm_attn_norm"
_EXPERTS, _OWN = f"{_BLOCK}.ffn.experts.mlp", "layers.{}.mlp.experts.{}"


class DbrxForCausalLM(MoEDecoder):
    """DBRX base and instruct."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("transformer.wte", "embed"),
        WeightRule(f"{_MIXED}.norm_1", "layers.{}.input_norm"),
        WeightRule(f"{_MIXED}.attn.Wqkv", "layers.{}.attention.qkv", split=ALL_PARTS),
        WeightRule(f"{_MIXED}.attn.out_proj", "layers.{}.attention.out"),
        WeightRule(f"{_MIXED}.norm_2", "layers.{}.mlp_norm"),
        *router_rules(f"{_BLOCK}.ffn.router.layer"),
        WeightRule(f"{_EXPERTS}.w1", f"{_OWN}.gate_up.weight", part=0, stacked=True),
        WeightRule(f"{_EXPERTS}.v1", f"{_OWN}.gate_up.weight", part=1, stacked=True),
        WeightRule(f"{_EXPERTS}.w2", f"{_OWN}.down.weight", stacked=True, transposed=True),
        WeightRule("transformer.norm_f", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    embedding_name: ClassVar[str] = "transformer.wte"
    blocks_name: ClassVar[str] = "transformer.blocks"
    mixture: ClassVar[Mapping[str, Any]] = {"router_name": "router.layer"}
    spelling: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "hidden_size": ("d_model",),
        "num_attention_heads": ("n_heads",),
        "num_hidden_layers": ("n_layers",),
        "max_position_embeddings": ("max_seq_len",),
    }

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        attention = _block(context.config, "attn_config")
        self.clip = Settings(attention).optional_positive("clip_qkv")
        self.mixture_settings = Settings(_block(context.config, "ffn_config"))
        own = {
            "num_key_value_heads": attention.get("kv_n_heads", 1),
            "rope_theta": attention.get("rope_theta", 10_000.0),
        }
        super().__init__(replace(context, config={**context.config, **own}), prefix)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        return LayerNorm(context, name, self.hidden_size(), 1e-5, bias=False)

    def make_final_norm(self, context: BuildContext, prefix: str) -> LayerNorm:
        return self.make_norm(context, f"{prefix}transformer.norm_f")

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        mixed = f"{name}.norm_attn_norm"
        return PreNormBlock(
            self.make_norm(context, f"{mixed}.norm_1"),
            self.make_attention(context, index, f"{mixed}.attn"),
            self.make_norm(context, f"{mixed}.norm_2"),
            self.make_mlp(context, index, f"{name}.ffn"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(
            context, name, clip=self.clip, qkv_name="Wqkv", out_name="out_proj", part_names=()
        )

    def is_dense(self, index: int) -> bool:
        return False

    def routing(self, index: int) -> Routing:
        own = self.mixture_settings
        own.refuse("moe_normalize_expert_weights", 1)
        return Routing(
            num_experts=own.integer("moe_num_experts", 4, maximum=MAX_EXPERTS),
            top_k=own.integer("moe_top_k", 1),
            # Absent means 1, and null that weights stay as they are.
            renormalise=own.config.get("moe_normalize_expert_weights", 1) is not None,
        )

    def expert_size(self, index: int) -> int:
        return self.mixture_settings.integer("ffn_hidden_size", 3584)

    def shared_size(self, index: int) -> int:
        return 0

    def gate(self) -> str:
        """The op's name of what gates."""
        stated = self.mixture_settings.config.get("ffn_act_fn")
        return Settings(stated if isinstance(stated, Mapping) else {}).activation(
            "name", default="silu"
        )


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = config.get(name) or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModel(f"config.json: {name} = {block!r:.200}: must be an object")
    return block
