"""Granite's multipliers, and the rotary tables and windows of Granite 4.1's layers.

IBM 2024, Granite 3.0 language models; the multipliers are those of Yang et al. 2022, arXiv:2203.03466.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace_models.config.rope import rope_settings, scaling_block
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.config.settings import Settings

FULL_EVERY = 4
"""Without ``layer_types``, the first of every four layers has no window."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Numbers that a config gives."""

    embedding: float
    """Times the tokens' vectors."""
    scores: float
    """Times attention's scores."""
    residual: float
    """Times what each half of a block adds to the stream."""
    logits: float
    """Times the logits."""

    @classmethod
    def from_settings(cls, settings: Settings) -> Multipliers:
        return cls(
            embedding=settings.number("embedding_multiplier", 1.0),
            scores=settings.number("attention_multiplier", 1.0),
            residual=settings.number("residual_multiplier", 1.0),
            logits=1.0 / settings.positive("logits_scaling", 1.0),
        )


def layer_rotary_tables(
    context: BuildContext, settings: Settings, num_layers: int, head_dim: int
) -> list[Tensor | None]:
    """Each layer's table, of a base of its own (``layer_rope_theta``); None: a base of 0, which stands for
    no positions."""
    own = rope_settings(context.config).theta
    thetas = settings.numbers("layer_rope_theta", num_layers) or [own] * num_layers
    limit = settings.integer("max_position_embeddings", 8192)

    def table(theta: float) -> Tensor:
        block = {**scaling_block(context.config), "rope_theta": theta}
        rope = rope_settings({**context.config, "rope_scaling": None, "rope_parameters": block})
        return rotary_table(context, rope, head_dim, max_positions=limit)

    tables = {theta: table(theta) for theta in sorted({own, *(theta for theta in thetas if theta)})}
    return [tables.get(theta) for theta in thetas]


def layer_window(settings: Settings, index: int) -> int | None:
    """The window of layer ``index``."""
    kinds = settings.layer_types()
    sliding = index % FULL_EVERY != 0 if kinds is None else kinds[index] == "sliding_attention"
    return settings.optional_integer("sliding_window") if sliding else None
