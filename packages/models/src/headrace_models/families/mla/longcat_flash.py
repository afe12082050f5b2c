"""LongCat-Flash: two layers of latent attention and MLP in one, with a mixture that skips the second;
some of the mixture's experts give back what they get. Meituan 2025, arXiv:2509.01322.

Block: two of Llama's; the mixture reads ``norm(h)`` of the first one's middle h and is added at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.rope import RopeSettings, rope_settings
from headrace_models.config.settings import MAX_EXPERTS, MAX_LAYERS
from headrace_models.layers.attention.mla import mla_rules, mla_scale
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.mla import MLADecoder
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.moe.router import Routing
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.loading.rules.llama import RULES
from headrace_models.loading.rules.moe import expert_rules, router_rules, shared_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.norm import NormLayer

THETA = 10_000_000.0
_LAYER = "model.layers.{}"


class DoubleBlock(Block):
    """Two ordinary blocks; what the mixture makes of the first one's middle is added at the end."""

    def __init__(
        self,
        context: BuildContext,
        input_norms: list[NormLayer],
        attentions: list[SelfAttention],
        mlp_norms: list[NormLayer],
        mlps: list[MLPLayer],
        mixture: MLPLayer,
    ) -> None:
        self.ops = context.ops
        self.input_norms, self.attentions = input_norms, attentions
        self.mlp_norms, self.mlps = mlp_norms, mlps
        self.mixture = mixture

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self._attended(0, x, residual, batch)
        shortcut = self.mixture(x)
        x, stream = self._attended(1, self.mlps[0](x), stream, batch)
        return self.ops.add(self.mlps[1](x), shortcut), stream

    def _attended(self, half: int, x: Tensor, residual: Any, batch: ForwardBatch) -> Any:
        x, stream = self.input_norms[half].add(x, residual)
        return self.mlp_norms[half].add(self.attentions[half](x, batch), stream)


class LongcatFlashForCausalLM(MLADecoder):
    """LongCat-Flash Chat and Thinking."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in RULES if ".layers." not in rule.source),
        *mla_rules(f"{_LAYER}.self_attn.{{}}", "layers.{}.attentions.{}"),
        WeightRule(f"{_LAYER}.input_layernorm.{{}}", "layers.{}.input_norms.{}"),
        WeightRule(f"{_LAYER}.post_attention_layernorm.{{}}", "layers.{}.mlp_norms.{}"),
        *shared_rules(f"{_LAYER}.mlps.{{}}", "layers.{}.mlps.{}"),
        *router_rules(
            f"{_LAYER}.mlp.router.classifier", f"{_LAYER}.mlp.router.e_score_correction_bias",
            "layers.{}.mixture.router",
        ),
        *expert_rules(f"{_LAYER}.mlp.experts", "layers.{}.mixture.experts"),
    )  # fmt: skip
    default_eps: ClassVar[float] = 1e-5

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        first = self.settings.integer("n_routed_experts", maximum=MAX_EXPERTS)
        more = self.settings.integer("zero_expert_num", 0, minimum=0, maximum=MAX_EXPERTS)
        numbers = "|".join(str(index) for index in range(first, first + more))
        return {
            r"model\.mtp\..*": "predicts more than one token",
            rf"model\.layers\.\d+\.mlp\.experts\.({numbers})\..*": "gives back what it gets",
        }

    def num_layers(self) -> int:
        """Number of layers, of two attentions each."""
        return self.settings.integer("num_layers", maximum=MAX_LAYERS)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("router_bias", False)
        self.settings.refuse("zero_expert_type", "identity")
        super().prepare(context, prefix)

    def rope_settings(self, context: BuildContext) -> RopeSettings:
        return rope_settings(context.config, theta=THETA)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return DoubleBlock(
            context,
            [self.make_norm(context, f"{name}.input_layernorm.{i}") for i in (0, 1)],
            [self.make_attention(context, index, f"{name}.self_attn.{i}") for i in (0, 1)],
            [self.make_norm(context, f"{name}.post_attention_layernorm.{i}") for i in (0, 1)],
            [self.make_mlp(context, index, f"{name}.mlps.{i}") for i in (0, 1)],
            self._mixture(context, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """The latents' multipliers make up for their size; that of queries goes into the scale."""
        sizes, hidden = self.sizes, self.hidden_size()
        scale = mla_scale(self.rope, sizes.nope_head_dim + sizes.rope_head_dim)
        if sizes.q_lora_rank is not None and self.settings.flag("mla_scale_q_lora", True):
            scale *= (hidden / sizes.q_lora_rank) ** 0.5
        grows = self.settings.flag("mla_scale_kv_lora", True)
        return self.mla_attention(
            context,
            name,
            scale=scale,
            latent_scale=(hidden / sizes.kv_lora_rank) ** 0.5 if grows else 1.0,
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        size = self.settings.integer("ffn_hidden_size")
        return GatedMLP(context, name, self.hidden_size(), size, self._activation())

    def _mixture(self, context: BuildContext, name: str) -> MLPLayer:
        count = self.settings.integer("n_routed_experts", maximum=MAX_EXPERTS)
        identities = self.settings.integer("zero_expert_num", 0, minimum=0, maximum=MAX_EXPERTS)
        routing = Routing(
            num_experts=count + identities,
            top_k=self.settings.integer("moe_topk"),
            scale=self.settings.positive("routed_scaling_factor", 1.0),
        )
        return SparseMoE(
            context,
            name,
            hidden_size=self.hidden_size(),
            intermediate_size=self.settings.integer("expert_ffn_hidden_size"),
            routing=routing,
            activation=self._activation(),
            router_name="router.classifier",
            corrected=True,
            exact_router=True,
            identities=identities,
        )

    def _activation(self) -> str:
        """Published configs do not name it."""
        has_one = self.context.config.get("hidden_act") is not None
        return self.settings.activation("hidden_act") if has_one else "silu"
