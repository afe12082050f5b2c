"""NomicBert: rotary BERT with gated MLPs and few biases (nomic-embed-text v1 and v1.5,
arctic-embed-m-long), or MLPs without gates and experts on every second layer (v2).

Nussbaum et al. 2024, arXiv:2402.01613; Nussbaum and Duderstadt 2025, arXiv:2502.07972. The config is
spelled as GPT-2's (``n_embd``) or as BERT's. The block is that of ``layers/encoders/rotary_bert.py``::

    x = norm(word + segment)
    h = norm(x + attention(x))              per block; queries and keys are rotated
    x = norm(h + down(silu(gate(h)) * up(h)))       or down(gelu(up(h))), or the experts of that

Letters: T tokens, H hidden size, I intermediate size, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_core.ops import PackedLinear
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import ACTIVATIONS, MAX_EXPERTS, MAX_LAYERS
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.encoders.rotary_bert import (
    SPLIT_NAMES,
    LayerNames,
    RotaryBert,
    encoder_rules,
)
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.mlp import MLP, GatedMLP, MLPLayer
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


class NonGatedMoE(MLPLayer):
    """``bias + sum over the k likeliest experts of p_e * down_e(act(up_e(x)))``, p from a softmax over
    all of them in float32, so that the k sum up to less than 1.

    Every rank holds all experts.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        activation: str,
    ) -> None:
        if top_k > num_experts:
            raise UnsupportedModel(
                f"config.json: moe_top_k = {top_k}: must be at most {num_experts} experts"
            )
        self.ops = context.ops
        self.top_k = top_k
        self.router = PlainLinear(context, f"{name}.router.layer", hidden_size, num_experts)
        sizes = (num_experts, intermediate_size, hidden_size)
        self.experts = NonGatedExperts(context, f"{name}.experts", sizes, activation)

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x)  # [T, E]
        weights, ids = self.ops.route_experts(scores, self.top_k)
        return self.experts(x, weights, ids)


class NonGatedExperts(WeightLayer):
    """The experts' weights, and one bias for their sum.

    Args:
        sizes: E, I, H.
    """

    bias: Tensor

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int, int], activation: str
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.sizes, self.activation = sizes, activation
        self.packed: tuple[PackedLinear, PackedLinear] | None = None

    def slots(self) -> Mapping[str, Slot]:
        experts, inner, hidden = self.sizes
        both = Slot((experts * inner, hidden))
        return {"up": both, "down": both, "bias": Slot((hidden,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pack = self.ops.expert_linear.pack
        up, down = (tensors[key].view(self.sizes) for key in ("up", "down"))
        self.packed = pack(up), pack(down.transpose(1, 2).contiguous())
        self.bias = tensors["bias"]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, H], weights [T, k] float32, ids [T, k] -> [T, H]."""
        assert self.packed is not None, self.name
        up, down = self.packed
        inner = self.ops.activation(self.ops.expert_linear(x, up, ids), self.activation)
        out = self.ops.expert_linear(inner, down, ids, weights)
        return self.ops.add(out, in_every_row(self.bias, x.shape[0]))


_PREFIXES = ("nomic_bert.", "bert.", "")
_OWN_NAMES = LayerNames("encoder.layers.{}", "attn.Wqkv", "attn.out_proj", "norm1", "norm2")
_OWN_MLP = (
    WeightRule("mlp.fc12", "mlp.gate_up", part=0),
    WeightRule("mlp.fc11", "mlp.gate_up", part=1),
    WeightRule("mlp.fc1", "mlp.up"),
    WeightRule("mlp.fc2", "mlp.down"),
    WeightRule("mlp.router.layer", "mlp.router"),
    WeightRule("mlp.experts.mlp.w1", "mlp.experts.up"),
    WeightRule("mlp.experts.mlp.w2", "mlp.experts.down"),
    WeightRule("mlp.experts.bias", "mlp.experts.bias"),
)
_SPLIT_MLP = (
    WeightRule("mlp.gate_proj", "mlp.gate_up", part=0),
    WeightRule("mlp.up_proj", "mlp.gate_up", part=1),
    WeightRule("mlp.down_proj", "mlp.down"),
)
_GATED = {"swiglu": "silu", "geglu": "gelu"}
_FIXED: dict[str, Any] = {
    "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "use_rms_norm": False, "parallel_block": False, "causal": False,
    "num_shared_experts": 0, "expert_choice_router": False, "moe_normalize_expert_weights": False,
    "ffn_div": 1,
}  # fmt: skip
"""Keys of variants that no checkpoint served here has."""


class NomicBertModel(RotaryBert):
    """Embeds by the mean."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_PREFIXES, _OWN_NAMES, _OWN_MLP, norm="emb_ln"),
        *encoder_rules(_PREFIXES, SPLIT_NAMES, _SPLIT_MLP, norm="embeddings.LayerNorm"),
    )
    base_name: ClassVar[str] = ""
    theta: ClassVar[float] = 1000.0
    num_segments: ClassVar[int] = 2

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        for name, served in _FIXED.items():
            value = context.config.get(name, served)
            if value != served and value is not None:
                raise UnsupportedModel(f"config.json: {name} = {value!r}: must be {served!r}")
        super().__init__(context, prefix)

    def either(self, own: str, other: str) -> str:
        """The name under which the config has a value."""
        return own if self.context.config.get(own) is not None else other

    def hidden_size(self) -> int:
        return self.settings.integer(self.either("n_embd", "hidden_size"))

    def num_layers(self) -> int:
        name = self.either("n_layer", "num_hidden_layers")
        return self.settings.integer(name, maximum=MAX_LAYERS)

    def num_heads(self) -> int:
        return self.settings.integer(self.either("n_head", "num_attention_heads"))

    def head_dim(self) -> int:
        hidden, heads = self.hidden_size(), self.num_heads()
        if hidden % heads:
            raise UnsupportedModel(f"config.json: n_embd = {hidden}: must be a multiple of {heads}")
        return hidden // heads

    def eps(self) -> float:
        return self.settings.number(self.either("layer_norm_epsilon", "layer_norm_eps"), 1e-12)

    def attention_bias(self) -> bool:
        return self.settings.flag("qkv_proj_bias", False)

    def prepare(self, context: BuildContext, prefix: str) -> None:
        theta = self.settings.positive("rotary_emb_base", self.theta)
        limit = self.settings.integer(self.either("n_positions", "max_position_embeddings"))
        rope = rope_settings(context.config, theta=theta, max_positions=limit)
        self.rotary = rotary_table(context, rope, self.head_dim(), max_positions=limit)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        hidden = self.hidden_size()
        inner = self.settings.integer(self.either("n_inner", "intermediate_size"), 4 * hidden)
        biases = [self.settings.flag(f"mlp_fc{layer}_bias", False) for layer in (1, 2)]
        plain = self.plain_activation()
        if plain is None:
            return GatedMLP(
                context, name, hidden, inner, self.gate(), bias=biases[0], down_bias=biases[1]
            )
        if self.has_experts(index):
            return NonGatedMoE(
                context,
                name,
                hidden_size=hidden,
                intermediate_size=inner,
                num_experts=self.settings.integer("num_experts", maximum=MAX_EXPERTS),
                top_k=self.settings.integer("moe_top_k", 1),
                activation=plain,
            )
        if biases[0] != biases[1]:
            raise UnsupportedModel(f"config.json: mlp_fc2_bias = {biases[1]}: must be mlp_fc1_bias")
        return MLP(context, f"{name}.fc1", f"{name}.fc2", hidden, inner, plain, bias=biases[0])

    def has_experts(self, index: int) -> bool:
        """True if the layer has experts: every n-th one, counted from the second."""
        every = self.settings.integer("moe_every_n_layers", 0, minimum=0)
        return every > 0 and index % every == 1

    def plain_activation(self) -> str | None:
        """Name of the activation of an MLP without gates, as the op calls it; None: MLPs have gates. Only the
        spelling of GPT-2 has it."""
        stated = self.context.config.get("activation_function")
        if stated in (None, *_GATED):
            return None
        if not isinstance(stated, str) or stated not in ACTIVATIONS:
            raise UnsupportedModel(
                f"config.json: activation_function = {stated!r:.200}: must be one of "
                f"{', '.join((*_GATED, *ACTIVATIONS))}"
            )
        return ACTIVATIONS[stated]

    def gate(self) -> str:
        """Name of the gate's activation, as the op calls it."""
        stated = self.context.config.get("activation_function")
        return self.settings.activation("hidden_act") if stated is None else _GATED[stated]
