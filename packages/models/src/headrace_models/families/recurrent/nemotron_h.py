"""Nemotron-H, Nemotron Nano 2 and 3: blocks of Mamba 2, of attention and of MLPs or experts, in a pattern
that the config spells out; experts may work on a projection of the stream (Nemotron 3). NVIDIA 2025,
arXiv:2504.03624.

Block: ``x + mixer(norm(x))`` or ``x + mlp(norm(x))``.

Letters: T tokens, H hidden size, L latent size, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS
from headrace_models.config.settings import MAX_EXPERTS, MAX_HEAD_DIM, MAX_LAYERS
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import FeedForwardBlock, MixerBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP, MLPLayer
from headrace_models.layers.moe.experts import Experts
from headrace_models.layers.moe.router import Router, Routing
from headrace_models.layers.norm import NormLayer
from headrace_models.layers.recurrent.mamba2 import Mamba2Mixer, Mamba2Sizes
from headrace_models.loading.rules.mamba2 import scan_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_KNOWN = {kind: kind for kind in LETTERS.values()}
_OLD = {"mamba": "linear_attention", "attention": "full_attention"}


def _rules(base: str) -> tuple[WeightRule, ...]:
    mixer = f"{base}.layers.{{}}.mixer"
    return (
        WeightRule(f"{base}.embeddings", "embed"),
        WeightRule(f"{base}.layers.{{}}.norm", "layers.{}.norm"),
        *scan_rules(mixer),
        WeightRule(f"{mixer}.q_proj", "layers.{}.mixer.qkv", part=0),
        WeightRule(f"{mixer}.k_proj", "layers.{}.mixer.qkv", part=1),
        WeightRule(f"{mixer}.v_proj", "layers.{}.mixer.qkv", part=2),
        WeightRule(f"{mixer}.o_proj", "layers.{}.mixer.out"),
        WeightRule(f"{mixer}.up_proj", "layers.{}.mixer.up"),
        WeightRule(f"{mixer}.down_proj", "layers.{}.mixer.down"),
        WeightRule(f"{mixer}.gate", "layers.{}.mixer.router"),
        WeightRule(f"{mixer}.gate.e_score_correction_bias", "layers.{}.mixer.router.correction"),
        WeightRule(f"{mixer}.experts.{{}}.up_proj", "layers.{}.mixer.experts.{}.up"),
        WeightRule(f"{mixer}.experts.{{}}.down_proj", "layers.{}.mixer.experts.{}.down"),
        WeightRule(f"{mixer}.shared_experts.up_proj", "layers.{}.mixer.shared.up"),
        WeightRule(f"{mixer}.shared_experts.down_proj", "layers.{}.mixer.shared.down"),
        WeightRule(f"{mixer}.fc1_latent_proj", "layers.{}.mixer.to_latent"),
        WeightRule(f"{mixer}.fc2_latent_proj", "layers.{}.mixer.from_latent"),
        WeightRule(f"{base}.norm_f", "final_norm"),
    )


class RoutedMLPs(MLPLayer):
    """``up(sum over the chosen experts of weight_e * expert_e(down(x))) + shared(x)``.

    Args:
        to_latent, from_latent: down and up; None: experts work on x itself.
    """

    def __init__(
        self,
        context: BuildContext,
        router: Router,
        experts: Experts,
        shared: MLPLayer,
        to_latent: Linear | None = None,
        from_latent: Linear | None = None,
    ) -> None:
        self.ops, self.communicator = context.ops, context.communicator
        self.router = router
        self.experts = experts
        self.shared = shared
        self.to_latent, self.from_latent = to_latent, from_latent

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        inner = x if self.to_latent is None else self.to_latent(x)
        out = self.experts.summed(self.experts(inner, *self.router(x)))
        out = out if self.from_latent is None else self.from_latent(out)
        return self.ops.add(out, self.shared(x))


class NemotronHForCausalLM(LlamaDecoder):
    """Checkpoints name the base model ``backbone``, transformers ``model``."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *_rules("backbone"),
        *_rules("model"),
        WeightRule("lm_head", "head"),
    )
    ignored_weights: ClassVar[Mapping[str, str]] = {r"mtp.*": "a head that predicts several tokens"}
    embedding_name: ClassVar[str] = "backbone.embeddings"
    blocks_name: ClassVar[str] = "backbone.layers"

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("sliding_window")
        self.rotary = None

    def norm_eps(self) -> float:
        return self.settings.number("layer_norm_epsilon", self.settings.number("norm_eps", 1e-5))

    def make_final_norm(self, context: BuildContext, prefix: str) -> NormLayer:
        return self.make_norm(context, f"{prefix}backbone.norm_f")

    def head_dim(self) -> int:
        """Early configs say ``attention_head_dim``."""
        return self.settings.head_dim(self.settings.integer("attention_head_dim", 128))

    def num_layers(self) -> int:
        return len(self.kinds())

    def kinds(self) -> list[str]:
        """The kind of each block, of the values of :data:`LETTERS`."""
        pattern = self.context.config.get("hybrid_override_pattern")
        listed = self.context.config.get("layers_block_type")
        if listed is None and isinstance(pattern, str):
            listed = [LETTERS.get(letter) for letter in pattern]
        known = {**_KNOWN, **_OLD}
        given = listed if isinstance(listed, list) else []
        kinds = [known[kind] for kind in given if isinstance(kind, str) and kind in known]
        if not 0 < len(kinds) == len(given) <= MAX_LAYERS:
            raise UnsupportedModel(
                f"config.json: hybrid_override_pattern = {pattern!r:.200}, layers_block_type = "
                f"{listed!r:.200}: one must say of each layer whether it is one of "
                + ", ".join(LETTERS.values())
            )
        return kinds

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        norm, kind, mixer = (
            self.make_norm(context, f"{name}.norm"),
            self.kinds()[index],
            f"{name}.mixer",
        )
        if kind == "linear_attention":
            return MixerBlock(norm, self.make_mamba(context, mixer))
        if kind == "full_attention":
            return MixerBlock(norm, self.make_attention(context, index, mixer))
        return FeedForwardBlock(norm, self.make_mlp(context, index, mixer))

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        return self.attention(context, name)

    def make_mamba(self, context: BuildContext, name: str) -> Mamba2Mixer:
        sizes = Mamba2Sizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("mamba_num_heads", 128),
            head_dim=self.settings.integer("mamba_head_dim", 64, maximum=MAX_HEAD_DIM),
            num_groups=self.settings.integer("n_groups", 8),
            state_size=self.settings.integer("ssm_state_size", 128),
            taps=self.settings.integer("conv_kernel", 4, maximum=MAX_TAPS),
        )
        least = self.settings.number("time_step_min", 0.001)
        return Mamba2Mixer(
            context,
            name,
            sizes,
            activation=self.settings.activation("mamba_hidden_act", default="silu"),
            bias=self.settings.flag("use_bias", False),
            conv_bias=self.settings.flag("use_conv_bias", True),
            norm_eps=self.norm_eps(),
            dt_limits=(least, float("inf")),  # transformers' bounds, not the config's
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        inner = self.settings.integer("intermediate_size")
        if self.kinds()[index] == "moe":
            return self.make_experts(context, name)
        return self.mlp(context, name, self.hidden_size(), inner)

    def mlp(self, context: BuildContext, name: str, outer: int, inner: int) -> MLP:
        return MLP(
            context,
            f"{name}.up_proj",
            f"{name}.down_proj",
            outer,
            inner,
            self.settings.activation("mlp_hidden_act", default="relu2"),
            bias=self.settings.flag("mlp_bias", False),
        )

    def make_experts(self, context: BuildContext, name: str) -> RoutedMLPs:
        """Experts that may work on a projection of the stream, and one for all tokens."""
        hidden = self.hidden_size()
        latent = self.settings.optional_integer("moe_latent_size")
        inner = self.settings.integer("moe_intermediate_size")
        shared = self.settings.integer("moe_shared_expert_intermediate_size")
        routing = Routing(
            num_experts=self.settings.integer("n_routed_experts", maximum=MAX_EXPERTS),
            top_k=self.settings.integer("num_experts_per_tok", 2),
            scoring="sigmoid",
            renormalise=self.settings.flag("norm_topk_prob", True),
            scale=self.settings.positive("routed_scaling_factor", 1.0),
            num_groups=self.settings.integer("n_group", 1),
            top_groups=self.settings.integer("topk_group", 1),
            group_score="top2",
        )
        experts = Experts(
            context,
            [f"{name}.experts.{index}" for index in range(routing.num_experts)],
            latent or hidden,
            inner,
            self.settings.activation("mlp_hidden_act", default="relu2"),
            module_names=("up_proj", "down_proj"),
            top_k=routing.top_k,
        )
        bias = self.settings.flag("mlp_bias", False)
        down = up = None
        if latent is not None:
            down = Linear(context, f"{name}.fc1_latent_proj", hidden, [Part(latent)], bias=bias)
            up = Linear(context, f"{name}.fc2_latent_proj", latent, [Part(hidden)], bias=bias)
        return RoutedMLPs(
            context,
            Router(context, f"{name}.gate", hidden, routing, corrected=True, exact=True),
            experts,
            self.mlp(context, f"{name}.shared_experts", hidden, shared),
            down,
            up,
        )
