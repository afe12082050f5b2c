"""Llama 4, text: attention within chunks, full layers without rotation between them, experts whose
input is weighed. Meta 2025, "The Llama 4 herd"; queries that grow with position: Nakanishi 2025,
arXiv:2501.19399.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_core.ops.optional.mix import MIX
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import RMSNorm
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import router_rules, shared_rules, stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MLP = "model.layers.{}.feed_forward"


class InputWeightedMoE(SparseMoE):
    """``sum over the chosen experts of expert_e(weight_e * x)``, plus the shared expert."""

    def __init__(
        self, context: BuildContext, name: str, *, routing: Routing, **arguments: Any
    ) -> None:
        super().__init__(context, name, routing=routing, **arguments)
        self.ones = torch.ones(routing.top_k, device=context.device)
        self.mix = context.ops.optional(MIX)
        if routing.top_k > 1:
            self.experts.no_adapters = "their rows are a token's for each of several experts"

    def __call__(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x)
        rows = self.mix(x[:, None], weights[..., None]).flatten(0, 1)
        out = self.experts(rows, None, ids.reshape(-1, 1))
        if ids.shape[1] > 1:
            each = out.view(*ids.shape, -1)
            ones = in_every_row(self.ones, ids.shape[0])[:, None]
            out = self.mix(each, ones)[:, 0]
        out = self.experts.summed(out)
        return out if self.shared is None else self.ops.add(out, self.shared(x))


class Llama4ForCausalLM(LlamaDecoder):
    """Text model of Scout and Maverick."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".mlp." not in rule.source),
        *shared_rules(_MLP, "layers.{}.mlp"),
        *router_rules(f"{_MLP}.router"),
        *stacked_rules(
            f"{_MLP}.experts.gate_up_proj", f"{_MLP}.experts.down_proj", transposed=True
        ),
        *shared_rules(f"{_MLP}.shared_expert"),
    )

    default_theta: ClassVar[float] = 500_000.0
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        super().prepare(context, prefix)
        self.temperature = self._temperature(context)
        self.rotates = self._rotating_layers()

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_mlp(context, index, f"{name}.feed_forward"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        if not self.rotates[index]:
            return self.attention(
                context,
                name,
                rotary=None,
                query_temperature=self.temperature,
                qkv_bias=bias,
                out_bias=bias,
            )
        size, eps = self.head_dim(), self.norm_eps()
        normed = self.settings.flag("use_qk_norm", True)

        def norm(part: str) -> RMSNorm | None:
            whose = f"{name}.{part}"
            return RMSNorm(context, whose, size, eps, weight=False) if normed else None

        return self.attention(
            context,
            name,
            interleaved=True,
            attention_chunk_size=self.settings.optional_integer("attention_chunk_size"),
            query_norm=norm("q_norm"),
            key_norm=norm("k_norm"),
            norm_after_rotary=True,
            qkv_bias=bias,
            out_bias=bias,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        if not self.is_sparse(index):
            return self._mlp(context, name, self.settings.integer("intermediate_size_mlp"))
        size = self.settings.integer("intermediate_size")
        routing = Routing(
            num_experts=self.settings.integer("num_local_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 1),
            scoring="sigmoid",
        )
        return InputWeightedMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=size,
            routing=routing,
            activation=self.settings.activation("hidden_act"),
            router_name="router",
            shared=self._mlp(context, f"{name}.shared_expert", size),
        )

    def is_sparse(self, index: int) -> bool:
        """True if the layer is a mixture: those listed, else every so many-th."""
        if self.context.config.get("moe_layers") is not None:
            return index in self.settings.integers("moe_layers")
        return (index + 1) % self.settings.integer("interleave_moe_layer_step", 1) == 0

    def _mlp(self, context: BuildContext, name: str, size: int) -> GatedMLP:
        activation = self.settings.activation("hidden_act")
        return GatedMLP(context, name, self.hidden_size(), size, activation)

    def _rotating_layers(self) -> list[bool]:
        """By layer: whether it rotates and sees its chunk, or neither."""
        count = self.num_layers()
        step = self.settings.integer("no_rope_layer_interval", 4)
        # 1 where it rotates, whatever the name.
        rotates = self.settings.marks("no_rope_layers", count) or [
            (index + 1) % step != 0 for index in range(count)
        ]
        kinds = self.context.config.get("layer_types")
        expected = ["chunked_attention" if x else "full_attention" for x in rotates]
        if kinds is not None and kinds != expected:
            raise UnsupportedModel(
                f"config.json: layer_types = {str(kinds)[:200]}: must be chunked where layers rotate "
                "and full where they do not"
            )
        return rotates

    def _tunes(self) -> bool:
        name = "attn_temperature_tuning"
        if isinstance(self.settings.config.get(name), bool):
            return self.settings.flag(name, True)
        return self.settings.integer(name, 1, minimum=0) > 0

    def _temperature(self, context: BuildContext) -> Tensor | None:
        """[P] float32: ``1 + scale * log(1 + floor((position + 1) / floor_scale))``. The switch is true or
        false, or, in Scout's and Maverick's configs, a number, of which no more is asked than that."""
        if not self._tunes():
            return None
        positions = torch.arange(context.max_model_len, dtype=torch.float32)
        steps = torch.floor((positions + 1) / self.settings.positive("floor_scale", 8192))
        scale = self.settings.number("attn_scale", 0.1)
        return (torch.log1p(steps) * scale + 1).to(context.device)
