"""MLP speculators: a small recurrence over guessed tokens, begun by the model's last hidden state.

Wertheimer et al. 2024, arXiv:2404.19124; layout of IBM's ``mlp_speculator`` checkpoints. Step i:
``s = gelu(ln_i(proj_i(s) + e / w * emb_i(token)))``, logits ``head_i(s)``, with
``w = 0.5 ** (0.5 / n_predict)`` and ``e = sqrt((1 - w * w) * inner_dim / 2)``; ``ln`` divides by the root
mean square, then scales and shifts. With ``scale_input`` the first s is divided by its root mean square and
by sqrt(2). With ``tie_weights`` all steps have the embedding, norm and head of the first, and all but the
first the projection of the second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.linear import Linear
from headrace_models.speculators.base import Head

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.layers.decoder import Decoder

EPS = 1e-6
Piece = TypeVar("Piece")
MAX_STEPS = 64


def scaled(x: Tensor) -> Tensor:
    """x [R, W] over its root mean square."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


class ScaledNorm(WeightLayer):
    """Root mean square norm with scale and shift."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.size,)), "bias": Slot((self.size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight, self.bias = tensors["weight"], tensors["bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight * scaled(x) + self.bias


class MLPSpeculatorHead(Head):
    """See the module's docstring."""

    target_methods = ()

    def __init__(self, context: BuildContext, target: Decoder, stored: Collection[str]) -> None:
        super().__init__(context, target, stored)
        settings = self.settings
        steps = settings.integer("n_predict", maximum=MAX_STEPS)
        width, vocab = settings.integer("emb_dim"), settings.integer("vocab_size")
        inner = settings.integer("inner_dim", 0, minimum=0) or width
        self.tied = settings.flag("tie_weights", False)
        self.scales_input = settings.flag("scale_input", False)
        self.most, self.width = steps, inner
        own = 1 if self.tied else steps
        self.emb = [Embedding(context, f"emb.{i}", vocab, inner) for i in range(own)]
        self.proj = [
            Linear(context, f"proj.{i}", inner if i else width, [Part(inner)])
            for i in range(min(steps, 2) if self.tied else steps)
        ]
        self.ln = [ScaledNorm(f"ln.{i}", inner) for i in range(own)]
        self.head = [Linear(context, f"head.{i}", inner, [Part(vocab)]) for i in range(own)]
        weight = 0.5 ** (0.5 / steps)
        self.share = math.sqrt((1 - weight**2) * inner / 2) / weight

    def rules(self) -> Sequence[WeightRule]:
        return [
            WeightRule(f"{name}.{{}}", f"{name}.{{}}") for name in ("emb", "proj", "ln", "head")
        ]

    def passed_over(self) -> Mapping[str, str]:
        if not self.tied:
            return {}
        return {
            r"(emb|ln|head)\.[1-9]\d*\..*": "that of the first step",
            r"proj\.([2-9]|[1-9]\d+)\..*": "that of the second step",
        }

    @classmethod
    def rename(cls, name: str, config: Mapping[str, Any]) -> str:
        return name.removeprefix("speculator.")

    def project(self, hidden: Tensor, streams: Sequence[Tensor]) -> Tensor:
        return scaled(hidden) / math.sqrt(2) if self.scales_input else hidden.clone()

    def forward(
        self, batch: ForwardBatch, states: Tensor, depth: int, vectors: Tensor | None = None
    ) -> Tensor:
        x = of_step(self.proj, depth)(states)
        x = x + self.share * of_step(self.emb, depth)(batch.input_ids)
        return self.picked(batch, torch.nn.functional.gelu(of_step(self.ln, depth)(x)))

    def compute_logits(self, states: Tensor, depth: int) -> Tensor:
        return of_step(self.head, depth)(states)


def of_step(pieces: Sequence[Piece], depth: int) -> Piece:
    """A step's piece: the last one's, where steps share it."""
    return pieces[min(depth, len(pieces) - 1)]
