"""EAGLE: a decoder layer that goes on with the model's last hidden states.

Li et al. 2024, arXiv:2401.15077. State of position p and embedding of token p + 1, side by side and brought
to the model's width, go through Llama layers of which the first has no norm before its attention; what comes
out stands for the state of position p + 1. Embeddings and head are the model's.

Layouts: ``fc``, ``layers.N`` (SafeAILab's ``EagleLlamaForCausalLM``); ``fusion_fc``, ``transformer``
(``speculators_model_type: eagle``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import NoNorm
from headrace_models.loading.rules.llama import RULES
from headrace_models.speculators.base import Head, LlamaPieces

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.decoder import Decoder

LAYER_RULES = tuple(
    WeightRule(rule.source.removeprefix("model."), rule.target, part=rule.part)
    for rule in RULES
    if rule.source.startswith("model.layers.")
)


class EagleHead(Head):
    """See the module's docstring. ``most``: any number of guesses."""

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        super().__init__(context, target, stored)
        self.settings.refuse("layernorms", False)
        self.settings.refuse("add_para_norm", False)
        pieces = LlamaPieces(context)
        size = pieces.size
        self.fc = Linear(context, "fc", 2 * size, [Part(size)], bias="fc.bias" in stored)
        self.layers = [
            PreNormBlock(
                pieces.norm(f"{name}.input_layernorm") if index else NoNorm(),
                pieces.attention(f"{name}.self_attn"),
                pieces.norm(f"{name}.post_attention_layernorm"),
                pieces.mlp(f"{name}.mlp"),
            )
            for index in range(self.settings.integer("num_hidden_layers", 1, maximum=64))
            for name in [f"layers.{index}"]
        ]

    def rules(self) -> Sequence[WeightRule]:
        return (WeightRule("fc", "fc"), *LAYER_RULES)

    def passed_over(self) -> Mapping[str, str]:
        return {r"(embed_tokens|lm_head)\.weight": "the model's own are shared"}

    @classmethod
    def rename(cls, name: str, config: Mapping[str, Any]) -> str:
        name = name.removeprefix("model.")
        if name.startswith("transformer."):
            return f"layers.0.{name.removeprefix('transformer.')}"
        return name.replace("fusion_fc.", "fc.")

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        if vectors is None:
            vectors = self.token_vectors(batch.input_ids)
        x: Tensor = self.fc(torch.cat([vectors, states], dim=-1))
        residual: Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        assert residual is not None
        return self.picked(batch, x) + self.picked(batch, residual)
