"""A vector for each position, added to the token's: learned, or computed once; and a factor of
queries for each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.config.rope import rope_settings, scaling_block
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer, Slot
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.rotary import MAX_TABLE

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

FAIRSEQ_FIRST_POSITION = 2
"""Row of position 0 in tables of fairseq's models, which number positions as they number tokens, after
the padding."""


class LearnedPositions(Embedding):
    """A table of the checkpoint.

    Args:
        key: of the config that says how many positions there are; for messages.
        skip: the table's rows before that of position 0 (OPT and what descends from fairseq have 2).

    Raises:
        UnsupportedModel: contexts may be longer than the table.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        num_positions: int,
        size: int,
        *,
        key: str = "max_position_embeddings",
        skip: int = 0,
    ) -> None:
        if context.max_model_len > num_positions:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: must be at most {key} = {num_positions}; "
                "learned positions do not extend"
            )
        super().__init__(context, name, num_positions, size)
        self.skip = skip

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.num_rows + self.skip, self.size))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"][self.skip :]


class FixedPositions(Layer):
    """Sines and cosines of the position by falling frequencies (Vaswani et al. 2017,
    arXiv:1706.03762): the sines in the first half, the cosines in the second.

    Args:
        frequencies: [size / 2] float32.
        first: what position 0 counts as.

    Raises:
        UnsupportedModel: the table would be too large.
    """

    def __init__(self, context: BuildContext, frequencies: Tensor, *, first: int = 0) -> None:
        if context.max_model_len * 2 * len(frequencies) > MAX_TABLE:
            raise UnsupportedModel(
                f"max_model_len = {context.max_model_len}: the table of positions would have more "
                f"than {MAX_TABLE} entries; set a smaller max_model_len"
            )
        self.ops = context.ops
        counted = torch.arange(first, first + context.max_model_len, dtype=torch.float32)
        angles = counted[:, None] * frequencies[None, :]
        table = torch.cat((angles.sin(), angles.cos()), dim=1)
        self.table = table.to(device=context.device, dtype=getattr(torch, context.dtype))

    def __call__(self, positions: Tensor) -> Tensor:
        """positions [T] int64 -> [T, size]."""
        return self.ops.embedding(positions, self.table)


def query_temperature(context: BuildContext) -> Tensor | None:
    """[P] float32: ``1 + beta * log(1 + position // original context)``; None without beta."""
    block = Settings(scaling_block(context.config))
    if block.config.get("llama_4_scaling_beta") is None:
        return None
    beta = block.number("llama_4_scaling_beta")
    if beta < 0:
        raise UnsupportedModel(
            f"config.json: llama_4_scaling_beta = {beta:g}: must be a number of at least 0"
        )
    original = rope_settings(context.config).original_max_position_embeddings
    positions = torch.arange(context.max_model_len, dtype=torch.float32)
    return (1 + beta * torch.log1p(positions // original)).to(context.device)
