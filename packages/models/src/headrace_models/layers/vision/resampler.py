"""A resampler: a fixed number of learned queries looks at the states of an image, whatever its size.

Jaegle et al. 2021, arXiv:2103.03206; as MiniCPM-V has it, Yao et al. 2024, arXiv:2408.01800. Letters: Q
queries, E size of their vectors, T patches of all images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.axes import frequencies, places
from headrace_models.layers.vision.towers.clip import Vector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_EPS = 1e-6
_HEAD = 128
_THETA = 10_000.0


def resampler_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`Resampler`: its names in the checkpoint and in the model."""
    return (
        WeightRule(f"{source}.query", f"{target}.queries.vector"),
        WeightRule(f"{source}.kv_proj", f"{target}.narrow"),
        WeightRule(f"{source}.ln_q", f"{target}.query_norm"),
        WeightRule(f"{source}.ln_kv", f"{target}.state_norm"),
        WeightRule(f"{source}.attn.in_proj_weight", f"{target}.weights.vector"),
        WeightRule(f"{source}.attn.in_proj_bias", f"{target}.biases.vector"),
        WeightRule(f"{source}.attn.out_proj", f"{target}.out"),
        WeightRule(f"{source}.ln_post", f"{target}.last_norm"),
        WeightRule(f"{source}.proj", f"{target}.projection.vector"),
    )


class Resampler(Layer):
    """States of images -> Q vectors for each.

    Args:
        name: as the checkpoint spells it.
        sizes: of the states, and of the vectors: heads of 128 numbers.
        number: queries.
    """

    def __init__(
        self, context: BuildContext, name: str, sizes: tuple[int, int], number: int
    ) -> None:
        states, self.size = sizes
        if self.size % _HEAD:
            raise UnsupportedModel(
                f"config.json: hidden_size = {self.size}: must be so many heads of {_HEAD} numbers"
            )
        self.num_heads, self.number = self.size // _HEAD, number
        size = self.size
        self.queries = Vector(f"{name}.query", number, size)
        self.narrow: Linear | None = None
        if states != size:
            self.narrow = Linear(context, f"{name}.kv_proj", states, [Part(size)])
        self.query_norm = LayerNorm(context, f"{name}.ln_q", size, _EPS)
        self.state_norm = LayerNorm(context, f"{name}.ln_kv", size, _EPS)
        self.weights = Vector(f"{name}.attn.in_proj_weight", 3 * size, size)
        self.biases = Vector(f"{name}.attn.in_proj_bias", 3 * size)
        self.out = Linear(context, f"{name}.attn.out_proj", size, [Part(size)], bias=True)
        self.last_norm = LayerNorm(context, f"{name}.ln_post", size, _EPS)
        self.projection = Vector(f"{name}.proj", size, size)

    def __call__(self, states: Tensor, grids: Sequence[tuple[int, int]]) -> Tensor:
        """states [T, ...] -> [images * Q, E].

        Args:
            grids: rows and columns of each image's patches.
        """
        x = self.state_norm(states if self.narrow is None else self.narrow(states))
        placed = torch.cat([self.placed(*grid) for grid in grids]).to(x)
        to_query, to_key, to_value = zip(
            self.weights.vector.chunk(3), self.biases.vector.chunk(3), strict=True
        )
        query = functional.linear(self.asked(), *to_query)
        key, value = functional.linear(x + placed, *to_key), functional.linear(x, *to_value)
        lengths = [rows * columns for rows, columns in grids]
        seen = [
            self._attend(query, *own)
            for own in zip(torch.split(key, lengths), torch.split(value, lengths), strict=True)
        ]
        return self.last_norm(self.out(torch.cat(seen))) @ self.projection.vector

    def asked(self) -> Tensor:
        """[Q, E]: the queries."""
        return self.query_norm(self.queries.vector)

    def placed(self, rows: int, columns: int) -> Tensor:
        """[rows * columns, E]: what tells the places of an image's patches."""
        return waves(self.size, rows, columns)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [Q, E], key and value [patches, E] of an image -> [Q, E]. The ops' attention has as many
        keys as queries, so this is torch's."""
        q, k, v = (x.view(len(x), self.num_heads, -1).transpose(0, 1) for x in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)


def waves(size: int, rows: int, columns: int) -> Tensor:
    """[rows * columns, size] float32: sines and cosines of a patch's column, then of its row."""
    each = frequencies(_THETA, size // 4)
    angles = places(rows, columns).flip(-1).float()[:, :, None] * each
    return torch.cat((angles.sin(), angles.cos()), dim=-1).flatten(1)
