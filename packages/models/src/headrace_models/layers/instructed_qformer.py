"""A Q-Former that reads a text beside its queries: what they take from an image depends on it.

Dai et al. 2023, arXiv:2305.06500. Letters as in :mod:`headrace_models.layers.qformer`; T tokens of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Part
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.qformer import QFormer, QFormerBlock, qformer_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_WORDS, _POSITIONS = 30522, 512
"""Of BERT, where configs leave them out."""


def instructed_rules(source: str, queries: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of an :class:`InstructedQFormer`: its names in the checkpoint, and in the model."""
    tables, own = f"{source}.embeddings", f"{target}.layers.{{}}"
    layer = f"{source}.encoder.layer.{{}}"
    return (
        *qformer_rules(source, queries, target, "embeddings.layernorm"),
        WeightRule(f"{tables}.word_embeddings", f"{target}.words"),
        WeightRule(f"{tables}.position_embeddings", f"{target}.positions"),
        WeightRule(f"{layer}.intermediate.dense", f"{own}.text_up"),
        WeightRule(f"{layer}.output.dense", f"{own}.text_down"),
        WeightRule(f"{layer}.output.LayerNorm", f"{own}.text_norm"),
    )


class InstructedQFormer(QFormer):
    """States of an image and a text -> Q vectors. Arguments and errors are :class:`QFormer`'s."""

    def __init__(
        self,
        context: BuildContext,
        part: str,
        stated: Mapping[str, Any],
        names: tuple[str, str],
        number: int,
        state_size: int,
    ) -> None:
        super().__init__(context, part, stated, names, number, state_size)
        settings, tables = Settings(stated), f"{names[0]}.embeddings"
        words = settings.integer("vocab_size", _WORDS)
        self.words = Embedding(context, f"{tables}.word_embeddings", words, self.size)
        longest = settings.integer("max_position_embeddings", _POSITIONS)
        self.positions = Embedding(context, f"{tables}.position_embeddings", longest, self.size)

    def make_block(
        self, context: BuildContext, settings: Settings, name: str, state_size: int | None
    ) -> QFormerBlock:
        return InstructedBlock(context, settings, name, state_size)

    def instructed(self, states: Tensor, token_ids: Tensor) -> Tensor:
        """states [I, S, V] of images that one text stands beside, its token_ids [T] -> [I, Q, H]."""
        places = torch.arange(len(token_ids), device=token_ids.device)
        read = self.first_norm(self.words(token_ids) + self.positions(places))
        x, text = (
            first.expand(len(states), -1, -1)
            for first in (self.first_norm(self.queries.vector), read[None])
        )
        for layer in self.layers:
            assert isinstance(layer, InstructedBlock)
            x, text = layer.beside(x, text, states)
        return x


class InstructedBlock(QFormerBlock):
    """Queries and text attend to each other; the queries alone see the image; each has an MLP of its own."""

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, state_size: int | None
    ) -> None:
        super().__init__(context, settings, name, state_size)
        size, inner = settings.integer("hidden_size"), settings.integer("intermediate_size")
        self.text_up = Linear(context, f"{name}.intermediate.dense", size, [Part(inner)], bias=True)
        self.text_down = Linear(context, f"{name}.output.dense", inner, [Part(size)], bias=True)
        eps = settings.number("layer_norm_eps")
        self.text_norm = LayerNorm(context, f"{name}.output.LayerNorm", size, eps)

    def beside(self, x: Tensor, text: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """x [I, Q, H], text [I, T, H], states [I, S, V] -> the first two."""
        both = torch.cat((x, text), dim=1)
        x, text = torch.split(self.among(both, both), [x.shape[1], text.shape[1]], dim=1)
        if self.across is not None:
            x = self.across(x, states)
        flat = text.flatten(0, 1)
        made = self.text_down(self.text_up.activated(flat, self.activation))
        return self.widened(x), self.text_norm(flat + made).view(text.shape)
