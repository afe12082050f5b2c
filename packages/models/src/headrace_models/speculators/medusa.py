"""Medusa: heads of which each guesses a further token by the same hidden state.

Cai et al. 2024, arXiv:2401.10774. Head i: ``x = x + silu(linear(x))`` a few times, then a matrix to the
vocabulary; it guesses the token i + 2 places behind the state's. Heads know nothing of each other's guesses;
their likeliest tokens are checked as one chain, not as a tree.

Layouts: ``I.J.linear``, ``I.N`` (FasterDecoding's ``medusa_lm_head``, N residual blocks);
``blocks.I.layers.J``, ``lm_heads.I`` (``model_type: medusa``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.speculators.base import Head

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.decoder import Decoder

MAX_HEADS = 64


class ResidualBlocks(Layer):
    """One head but for its matrix."""

    def __init__(
        self, context: BuildContext, name: str, size: int, count: int, *, bias: bool
    ) -> None:
        self.layers = [
            Linear(context, f"{name}.layers.{j}", size, [Part(size)], bias=bias)
            for j in range(count)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.silu(layer(x))
        return x


class MedusaHead(Head):
    """See the module's docstring."""

    target_methods = ()

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        super().__init__(context, target, stored)
        settings, size = self.settings, target.hidden_size()
        vocab = target.settings.integer("vocab_size")
        settings.refuse("truncated_vocab_size", vocab)
        self.most = count = num_heads(settings)
        blocks = num_blocks(settings)
        bias = "blocks.0.layers.0.bias" in stored
        self.blocks = [
            ResidualBlocks(context, f"blocks.{i}", size, blocks, bias=bias) for i in range(count)
        ]
        shared = settings.flag("original_lm_head", False)
        self.heads = [
            Linear(context, f"lm_heads.{i}", size, [Part(vocab)])
            for i in range(1 if shared else count)
        ]

    def rules(self) -> Sequence[WeightRule]:
        return (
            WeightRule("blocks.{}.layers.{}", "blocks.{}.layers.{}"),
            WeightRule("lm_heads.{}", "heads.{}"),
        )

    @classmethod
    def rename(cls, name: str, config: Mapping[str, Any]) -> str:
        name = re.sub(r"^medusa_heads?\.", "", name)
        name = name.replace("lm_head.weight", "lm_heads.0.weight")
        block = re.fullmatch(r"(\d+)\.(\d+)\.linear\.(weight|bias)", name)
        if block:
            return f"blocks.{block[1]}.layers.{block[2]}.{block[3]}"
        head = re.fullmatch(r"(\d+)\.(\d+)\.weight", name)
        if head and int(head[2]) == num_blocks(Settings(config)):
            return f"lm_heads.{head[1]}.weight"
        return name

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        return self.picked(batch, states)

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        return self.heads[min(depth, len(self.heads) - 1)](self.blocks[depth](states))


def num_heads(settings: Settings) -> int:
    """Heads of a Medusa checkpoint. Raises: UnsupportedModel."""
    name = "num_heads" if settings.config.get("num_heads") is not None else "medusa_num_heads"
    return settings.integer(name, maximum=MAX_HEADS)


def num_blocks(settings: Settings) -> int:
    """Residual blocks of each head. Raises: UnsupportedModel."""
    stated = settings.config.get("num_hidden_layers") is not None
    name = "num_hidden_layers" if stated else "medusa_num_layers"
    return settings.integer(name, 1, maximum=16)
