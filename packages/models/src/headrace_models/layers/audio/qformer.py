"""A Q-Former over windows of states: learned queries look at each window.

Li et al. 2023, arXiv:2301.12597, section 3.1; over windows: Tang et al. 2023, arXiv:2310.13289. Letters: N
windows, Q queries, S states of a window, E size of queries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext


def qformer_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`WindowQFormer`: its names in the checkpoint and in the model."""
    former = f"{source}.qformer"
    layer, own = f"{former}.encoder.layer.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.query", f"{target}.queries.vector"),
        WeightRule(f"{source}.linear", f"{target}.out"),
        WeightRule(f"{former}.layernorm", f"{target}.norm"),
        *_attention_rules(f"{layer}.attention", f"{own}.attention"),
        *_attention_rules(f"{layer}.crossattention", f"{own}.cross"),
        WeightRule(f"{layer}.intermediate_query.dense", f"{own}.mlp.up"),
        WeightRule(f"{layer}.output_query.dense", f"{own}.mlp.down"),
        WeightRule(f"{layer}.output_query.LayerNorm", f"{own}.mlp_norm"),
    )


def _attention_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    return (
        WeightRule(f"{source}.attention.query", f"{target}.query"),
        WeightRule(f"{source}.attention.key", f"{target}.key_value", part=0),
        WeightRule(f"{source}.attention.value", f"{target}.key_value", part=1),
        WeightRule(f"{source}.output.dense", f"{target}.out"),
        WeightRule(f"{source}.output.LayerNorm", f"{target}.norm"),
    )


class WindowQFormer(Layer):
    """States of a recording -> Q vectors for each window of S.

    Args:
        settings: its part of the config.
        name: as the checkpoint spells it.
        sizes: of the states, and of the vectors.
        window: states of a window, and queries.
    """

    def __init__(
        self,
        context: BuildContext,
        settings: Settings,
        name: str,
        sizes: tuple[int, int],
        window: tuple[int, int],
    ) -> None:
        size, (states, vectors) = settings.integer("hidden_size"), sizes
        self.window, self.number = window
        stated = settings.integer("encoder_hidden_size", states)
        if stated != states:
            raise UnsupportedModel(
                f"config.json: projector_config.encoder_hidden_size = {stated}: must be {states}, the size "
                "of the encoder's states"
            )
        settings.refuse("use_qformer_text_input", False)
        every = settings.integer("cross_attention_frequency", 2)
        self.queries = Vector(f"{name}.query", 1, self.number, size)
        self.norm = LayerNorm(context, f"{name}.qformer.layernorm", size, _eps(settings))
        self.layers = [
            QFormerBlock(
                context,
                settings,
                f"{name}.qformer.encoder.layer.{index}",
                None if index % every else states,
            )
            for index in range(settings.integer("num_hidden_layers", maximum=MAX_LAYERS))
        ]
        self.out = Linear(context, f"{name}.linear", size, [Part(vectors)], bias=True)

    def __call__(self, states: Tensor) -> Tensor:
        """states [L, size] -> [ceil(L / S) * Q, vectors]; zeros fill up the last window, and are seen."""
        padded = functional.pad(states, (0, 0, 0, -len(states) % self.window))
        windows = padded.view(-1, self.window, padded.shape[1])
        x = self.norm(self.queries.vector).expand(len(windows), -1, -1)
        for layer in self.layers:
            x = layer(x, windows)
        return self.out(x.flatten(0, 1))


class QFormerBlock(Layer):
    """Queries see each other, then perhaps the states, then a feed-forward layer; a norm after each.

    Args:
        states: size of the states; None: the block does not look at them.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, states: int | None
    ) -> None:
        size = settings.integer("hidden_size")
        self.attention = QueryAttention(context, settings, f"{name}.attention", size)
        self.cross: QueryAttention | None = None
        if states is not None:
            self.cross = QueryAttention(context, settings, f"{name}.crossattention", states)
        self.mlp = MLP(
            context,
            f"{name}.intermediate_query.dense",
            f"{name}.output_query.dense",
            size,
            settings.integer("intermediate_size"),
            settings.activation("hidden_act", default="gelu"),
        )
        self.mlp_norm = LayerNorm(context, f"{name}.output_query.LayerNorm", size, _eps(settings))

    def __call__(self, x: Tensor, windows: Tensor) -> Tensor:
        """x [N, Q, E], windows [N, S, size] -> [N, Q, E]."""
        x = self.attention(x, x)
        if self.cross is not None:
            x = self.cross(x, windows)
        return self.mlp_norm(x + self.mlp(x.flatten(0, 1)).view_as(x))


class QueryAttention(Layer):
    """Queries look at states of their window.

    Args:
        states: size of these.
    """

    def __init__(self, context: BuildContext, settings: Settings, name: str, states: int) -> None:
        size, self.num_heads = (
            settings.integer("hidden_size"),
            settings.integer("num_attention_heads"),
        )
        inner = f"{name}.attention"
        self.query = Linear(context, f"{inner}.query", size, [Part(size)], bias=True)
        self.key_value = Linear(
            context,
            f"{inner}.key_value",
            states,
            [Part(size), Part(size)],
            bias=True,
            part_names=(f"{inner}.key", f"{inner}.value"),
        )
        self.out = Linear(context, f"{name}.output.dense", size, [Part(size)], bias=True)
        self.norm = LayerNorm(context, f"{name}.output.LayerNorm", size, _eps(settings))

    def __call__(self, x: Tensor, states: Tensor) -> Tensor:
        """x [N, Q, E], states [N, S, size] -> [N, Q, E]."""
        query = self.query(x.flatten(0, 1)).view_as(x)
        both = self.key_value(states.flatten(0, 1)).view(*states.shape[:2], -1)
        q, k, v = (
            part.reshape(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part in (query, *both.chunk(2, dim=-1))
        )
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + self.out(seen.flatten(0, 1)).view_as(x))


def _eps(settings: Settings) -> float:
    return settings.number("layer_norm_eps", 1e-12)
