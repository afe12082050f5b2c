"""ZAYA: compressed convolutional attention, and one expert for each token, which a small network picks by
what it found in the layers before; one more expert gives nothing. Zyphra 2025, arXiv:2511.17127.

Block: ``h = c(x) + b(attention(norm(x))); e(h) + d(experts(norm(h)))``; b to e are a factor and a bias for
each channel.

Letters: T tokens, H hidden size, E experts that give something, R size of what a router finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS, layer_kinds
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_EXPERTS
from headrace_models.families.recurrent.zaya_attention import (
    CCASizes,
    ConvolvedAttention,
)
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import in_every_row
from headrace_models.layers.linear import PlainLinear
from headrace_models.layers.moe.experts import Experts
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.rules.moe import stacked_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

KINDS = ("hybrid", "hybrid_sliding")
_THETAS = {"hybrid": 5_000_000.0, "hybrid_sliding": 10_000.0}
_LAYER = "model.layers.{}"
_ATTENTION, _GATE = f"{_LAYER}.self_attn", f"{_LAYER}.mlp.gate"
_MIXER, _ROUTER = "layers.{}.attention.mixer", "layers.{}.mlp.router"


def _scale_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    return tuple(WeightRule(f"{source}{name}", f"{target}.{name}") for name in ("scale", "bias"))


class SteeredExperts(Layer):
    """Experts and the router that picks them."""

    def __init__(self, router: SteeredRouter, experts: ZeroExperts) -> None:
        self.router, self.experts = router, experts

    def __call__(self, x: Tensor, found: Tensor | None) -> tuple[Tensor, Tensor]:
        weights, ids, found = self.router(x, found)
        return self.experts(x, *self.experts.places(weights, ids)), found


class SteeredRouter(Layer):
    """A network of three layers over a narrow projection, to which that of the router before is added.

    Args:
        size: R, of the projection.
        classes: experts, and one that gives nothing.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        hidden_size: int,
        size: int,
        classes: int,
        *,
        eps: float,
        is_first: bool,
    ) -> None:
        self.ops, inner = context.ops, f"{name}.router_mlp"
        self.down = PlainLinear(context, f"{name}.down_proj", hidden_size, size, bias=True)
        self.norm = RMSNorm(context, f"{inner}.norm", size, eps)
        self.inner = [
            PlainLinear(context, f"{inner}.{part}", size, size, bias=True)
            for part in ("fc1", "fc2")
        ]
        self.out = PlainLinear(context, f"{inner}.out_proj", size, classes)
        self.pick = Pick(name, size, classes, is_first=is_first)

    def __call__(self, x: Tensor, found: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, H], found [T, R] -> weights [T, 1], experts [T, 1], what is found here [T, R]."""
        narrow, share = self.down(x), self.pick.before
        if found is not None and share is not None:
            narrow = self.ops.add(narrow, self.ops.gate(found, in_every_row(share, found.shape[0])))
        y = self.norm(narrow)
        for layer in self.inner:
            y = self.ops.activation(layer(y), "gelu")
        weights, ids = self.ops.route_experts(self.out(y), 1, bias=self.pick.balance)
        return weights, ids, narrow


class Pick(WeightLayer):
    """Terms that are added before the choice, and how much of what was found before."""

    def __init__(self, name: str, size: int, classes: int, *, is_first: bool) -> None:
        self.name, self.size, self.classes, self.is_first = name, size, classes, is_first
        self.before: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        balance = {"balance": Slot((self.classes,), "float32", any_float=True)}
        return balance if self.is_first else {**balance, "before": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.balance, self.before = tensors["balance"], tensors.get("before")


class ZeroExperts(Experts):
    """Experts of which one more, number E, gives nothing (a zero expert): it is packed with the others, as
    zeros, so that a step is captured whoever is sent where."""

    def _stacked(self, tensors: Mapping[str, Tensor], at: int) -> Tensor:
        stacked = super()._stacked(tensors, at)
        return torch.cat((stacked, torch.zeros_like(stacked[:1])))

    def places(self, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts to call these with. Only plain weights have room for one more expert: without
        them, a token of the zero expert is sent to expert 0 with a weight of 0."""
        if self.is_plain:
            return weights, ids
        gets_nothing = ids == len(self.halves)
        return weights.masked_fill(gets_nothing, 0.0), ids.masked_fill(gets_nothing, 0)


class RowScale(WeightLayer):
    """``(x + bias) * scale``.

    Args:
        name: what both names begin with, as the checkpoint spells it.
    """

    def __init__(self, context: BuildContext, name: str, size: int) -> None:
        self.name, self.ops, self.size = name, context.ops, size

    def slots(self) -> Mapping[str, Slot]:
        return {"scale": Slot((self.size,)), "bias": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.scale = tensors["scale"]
        self.added = (tensors["bias"].float() * self.scale.float()).to(self.scale.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> the same shape."""
        scaled = self.ops.gate(x, in_every_row(self.scale, x.shape[0]))
        return self.ops.add(scaled, in_every_row(self.added, x.shape[0]))


class ZayaBlock(Block):
    """Both halves' results and the stream are scaled, each channel by itself, before they are added.

    Args:
        scales: of what attention found, of the stream then, and of the experts the same.
    """

    def __init__(
        self,
        input_norm: NormLayer,
        attention: ConvolvedAttention,
        mlp_norm: NormLayer,
        mlp: SteeredExperts,
        scales: Sequence[RowScale],
    ) -> None:
        self.input_norm = input_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_found, self.attention_stream, self.mlp_found, self.mlp_stream = scales

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        """As the first of a stack."""
        x, stream, _ = self.run(x, residual, None, batch)
        return x, stream

    def run(
        self, x: Tensor, residual: Tensor | None, found: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x and residual as a block's; ``found`` [T, R] is the router's before."""
        x, stream = self.input_norm.add(x, residual)
        x = self.attention_found(self.attention(x, batch))
        x, stream = self.mlp_norm.add(x, self.attention_stream(stream))
        x, found = self.mlp(x, found)
        return self.mlp_found(x), self.mlp_stream(stream), found


class ZayaForCausalLM(LlamaDecoder):
    """ZAYA1 8B, as transformers lays it out. The stream is in the activations' dtype."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        *_scale_rules("model.input_hidden_states_", "input_scale"),
        WeightRule(f"{_LAYER}.input_layernorm", "layers.{}.input_norm"),
        *(
            WeightRule(f"{_ATTENTION}.qkv_proj.{name}", "layers.{}.attention.qkv", part=part)
            for part, name in enumerate(("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"))
        ),
        WeightRule(f"{_ATTENTION}.qkv_proj.conv_qk_depthwise", f"{_MIXER}.conv"),
        WeightRule(f"{_ATTENTION}.qkv_proj.conv_qk_grouped", f"{_MIXER}.within"),
        WeightRule(f"{_ATTENTION}.qk_norm", "layers.{}.attention.unit"),
        WeightRule(f"{_ATTENTION}.o_proj", "layers.{}.attention.out"),
        WeightRule(f"{_LAYER}.post_attention_layernorm", "layers.{}.mlp_norm"),
        WeightRule(f"{_GATE}.down_proj", f"{_ROUTER}.down"),
        WeightRule(f"{_GATE}.router_states_scale", f"{_ROUTER}.pick.before"),
        WeightRule(f"{_GATE}.balancing_biases", f"{_ROUTER}.pick.balance"),
        WeightRule(f"{_GATE}.router_mlp.norm", f"{_ROUTER}.norm"),
        WeightRule(f"{_GATE}.router_mlp.fc1", f"{_ROUTER}.inner.0"),
        WeightRule(f"{_GATE}.router_mlp.fc2", f"{_ROUTER}.inner.1"),
        WeightRule(f"{_GATE}.router_mlp.out_proj", f"{_ROUTER}.out"),
        *stacked_rules(f"{_LAYER}.mlp.experts.gate_up_proj", f"{_LAYER}.mlp.experts.down_proj"),
        *(
            rule
            for half in ("attention", "mlp")
            for what, target in (("hidden_states", "found"), ("residual", "stream"))
            for rule in _scale_rules(
                f"{_LAYER}.post_{half}_residual_scale.{what}_", f"layers.{{}}.{half}_{target}"
            )
        ),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    ties_embeddings: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-5

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("attention_bias", False)
        self.settings.refuse("num_experts_per_tok", 1)
        self.settings.refuse("lm_head_bias", False)
        config, size = self.settings.config, self.head_dim()
        limit = self.settings.integer("max_position_embeddings", 131_072)
        self.tables = {
            kind: rotary_table(
                context,
                rope_settings(config, kind, theta=theta, partial=0.5),
                size,
                max_positions=limit,
            )
            for kind, theta in _THETAS.items()
        }
        self.rotary = self.tables["hybrid"]
        self.input_scale = RowScale(
            context, f"{prefix}model.input_hidden_states", self.hidden_size()
        )

    def head_dim(self) -> int:
        return self.settings.head_dim(128)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.input_scale(self.embed(ids))

    def run_blocks(self, x: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        """The stack, in which each layer's router hands on what it found to the next one's."""
        residual: Tensor | None = None
        found: Tensor | None = None
        for layer in self.layers:
            assert isinstance(layer, ZayaBlock)
            x, residual, found = layer.run(x, residual, found, batch)
        return x, residual

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        size = self.hidden_size()
        scales = [
            RowScale(context, f"{name}.post_{half}_residual_scale.{what}", size)
            for half in ("attention", "mlp")
            for what in ("hidden_states", "residual")
        ]
        return ZayaBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_convolved(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_experts(context, index, f"{name}.mlp"),
            scales,
        )

    def make_convolved(self, context: BuildContext, index: int, name: str) -> ConvolvedAttention:
        kinds = layer_kinds(self.settings, "layer_types", known=KINDS, count=self.num_layers())
        kind = "hybrid" if kinds is None else kinds[index]
        taps = [
            self.settings.integer(key, 2, minimum=2, maximum=MAX_TAPS)
            for key in ("cca_time0", "cca_time1")
        ]
        sizes = CCASizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("num_attention_heads"),
            num_kv_heads=self.settings.num_kv_heads(),
            head_dim=self.head_dim(),
            taps=(taps[0], taps[1]),
        )
        window = self.settings.integer("sliding_window") if kind == "hybrid_sliding" else None
        return ConvolvedAttention(
            context, name, sizes, rotary=self.tables[kind], sliding_window=window
        )

    def make_experts(self, context: BuildContext, index: int, name: str) -> SteeredExperts:
        hidden, count = (
            self.hidden_size(),
            self.settings.integer("num_experts", maximum=MAX_EXPERTS),
        )
        router = SteeredRouter(
            context,
            f"{name}.gate",
            hidden,
            self.settings.integer("router_hidden_size", 256),
            count + 1,
            eps=self.norm_eps(),
            is_first=index == 0,
        )
        experts = ZeroExperts(
            context,
            [f"{name}.experts.{expert}" for expert in range(count)],
            hidden,
            self.settings.integer("moe_intermediate_size"),
            self.settings.activation("hidden_act", default="silu"),
        )
        return SteeredExperts(router, experts)
