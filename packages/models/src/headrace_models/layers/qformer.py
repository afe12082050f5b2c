"""A Q-Former: learned queries that attend to each other and to states of media, by BERT's blocks.

Li et al. 2023, arXiv:2301.12597, section 3.1. Letters: I images or windows of recordings, Q queries, H their
size, S states of each, V their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "layer_norm_eps": 1e-12, "cross_attention_frequency": 2,
}  # fmt: skip
"""Values that configs may leave out."""


def qformer_rules(
    source: str, queries: str, target: str, first_norm: str = "layernorm"
) -> tuple[WeightRule, ...]:
    """Rules of a :class:`QFormer`: its names in the checkpoint, and in the model."""
    layer, own = f"{source}.encoder.layer.{{}}", f"{target}.layers.{{}}"
    attentions = (
        WeightRule(f"{layer}.{theirs}.{a}", f"{own}.{mine}.{b}")
        for theirs, mine in (("attention", "among"), ("crossattention", "across"))
        for a, b in (
            ("attention.query", "query"),
            ("attention.key", "key"),
            ("attention.value", "value"),
            ("output.dense", "out"),
            ("output.LayerNorm", "norm"),
        )
    )
    return (
        WeightRule(queries, f"{target}.queries.vector"),
        WeightRule(f"{source}.{first_norm}", f"{target}.first_norm"),
        *attentions,
        WeightRule(f"{layer}.intermediate_query.dense", f"{own}.up"),
        WeightRule(f"{layer}.output_query.dense", f"{own}.down"),
        WeightRule(f"{layer}.output_query.LayerNorm", f"{own}.norm"),
    )


class QFormer(Layer):
    """States of images -> Q vectors for each.

    Args:
        part: key of its part of the config, for messages.
        stated: that part.
        names: of the blocks and of the queries, as the checkpoint spells them.
        number: queries.
        state_size: V.

    Raises:
        UnsupportedModel: the config says another V, or no whole heads.
    """

    def __init__(
        self,
        context: BuildContext,
        part: str,
        stated: Mapping[str, Any],
        names: tuple[str, str],
        number: int,
        state_size: int,
    ) -> None:
        (source, queries), settings = names, Settings({**_DEFAULTS, **stated})
        width = settings.integer("encoder_hidden_size", state_size)
        if width != state_size:
            raise UnsupportedModel(
                f"config.json: {part}.encoder_hidden_size = {width}: must be {state_size}, the size of the "
                "encoder's states"
            )
        self.size = settings.integer("hidden_size")
        heads = settings.integer("num_attention_heads")
        if self.size % heads:
            raise UnsupportedModel(
                f"config.json: {part}.hidden_size = {self.size}: must be so many whole heads as "
                f"num_attention_heads = {heads}"
            )
        every = settings.integer("cross_attention_frequency")
        self.queries = Vector(queries, 1, number, self.size)
        eps = settings.number("layer_norm_eps")
        self.first_norm = LayerNorm(context, f"{source}.layernorm", self.size, eps)
        self.layers = [
            self.make_block(
                context,
                settings,
                f"{source}.encoder.layer.{index}",
                None if index % every else state_size,
            )
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]

    def make_block(
        self, context: BuildContext, settings: Settings, name: str, state_size: int | None
    ) -> QFormerBlock:
        """A block of the kind that this one has."""
        return QFormerBlock(context, settings, name, state_size)

    def __call__(self, states: Tensor) -> Tensor:
        """states [I, S, V] -> [I, Q, H]."""
        x = self.first_norm(self.queries.vector).expand(len(states), -1, -1)
        for layer in self.layers:
            x = layer(x, states)
        return x


class QFormerBlock(Layer):
    """``norm(x + attention(x))`` among the queries, the same across to the image, and ``norm(x + mlp(x))``.

    Args:
        name: as the checkpoint spells it.
        state_size: V; None: this block does not see the image.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, state_size: int | None
    ) -> None:
        size, eps = settings.integer("hidden_size"), settings.number("layer_norm_eps")
        heads = settings.integer("num_attention_heads")
        self.among = NormedAttention(context, f"{name}.attention", (size, size), heads, eps)
        self.across: NormedAttention | None = None
        if state_size is not None:
            self.across = NormedAttention(
                context, f"{name}.crossattention", (size, state_size), heads, eps
            )
        inner = settings.integer("intermediate_size")
        self.activation = settings.activation("hidden_act")
        self.up = Linear(
            context, f"{name}.intermediate_query.dense", size, [Part(inner)], bias=True
        )
        self.down = Linear(context, f"{name}.output_query.dense", inner, [Part(size)], bias=True)
        self.norm = LayerNorm(context, f"{name}.output_query.LayerNorm", size, eps)

    def __call__(self, x: Tensor, states: Tensor) -> Tensor:
        """x [I, Q, H], states [I, S, V] -> [I, Q, H]."""
        x = self.among(x, x)
        if self.across is not None:
            x = self.across(x, states)
        return self.widened(x)

    def widened(self, x: Tensor) -> Tensor:
        """x [I, Q, H] -> ``norm(x + mlp(x))``."""
        flat = x.flatten(0, 1)
        return self.norm(flat + self.down(self.up.activated(flat, self.activation))).view(x.shape)


class NormedAttention(Layer):
    """``norm(x + attention(x, states))``. The ops' attention has as many keys as queries, so this is torch's.

    Args:
        sizes: of the queries' vectors and of the states.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int], heads: int, eps: float
    ) -> None:
        size, state_size = sizes
        self.num_heads = heads
        self.query, self.key, self.value = (
            Linear(context, f"{name}.attention.{which}", width, [Part(size)], bias=True)
            for which, width in (("query", size), ("key", state_size), ("value", state_size))
        )
        self.out = Linear(context, f"{name}.output.dense", size, [Part(size)], bias=True)
        self.norm = LayerNorm(context, f"{name}.output.LayerNorm", size, eps)

    def __call__(self, x: Tensor, states: Tensor) -> Tensor:
        """x [I, Q, H], states [I, S, V] -> [I, Q, H]."""
        found = functional.scaled_dot_product_attention(
            self._by_head(self.query, x),
            self._by_head(self.key, states),
            self._by_head(self.value, states),
        )
        flat = found.transpose(1, 2).flatten(2).flatten(0, 1)
        return self.norm(self.out(flat) + x.flatten(0, 1)).view(x.shape)

    def _by_head(self, layer: Linear, x: Tensor) -> Tensor:
        """x [I, N, ...] -> [I, heads, N, H / heads]."""
        made = layer(x.flatten(0, 1))
        return made.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
