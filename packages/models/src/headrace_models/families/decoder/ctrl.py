"""CTRL: scaled embeddings, computed positions, a head that is the embedding and has a bias.

Keskar et al. 2019, arXiv:1909.05858.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Spelling
from headrace_models.layers.decoders.gpt import GPT2_KEYS, GPTDecoder, Names
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.positions import FixedPositions

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

NAMES = Names(
    embedding="transformer.w",
    blocks="transformer.h",
    final_norm="transformer.layernorm",
    head="lm_head",
    input_norm="layernorm1",
    attention="multi_head_attention",
    qkv=("Wq", "Wk", "Wv"),
    out="dense",
    mlp_norm="layernorm2",
    up="ffn.0",
    down="ffn.2",
)


class CTRLLMHeadModel(GPTDecoder):
    """CTRL, 1.6 billion parameters."""

    names: ClassVar[Names] = NAMES
    weight_rules: ClassVar[Sequence[WeightRule]] = NAMES.rules()
    spelling: ClassVar[Spelling] = {**GPT2_KEYS, "intermediate_size": ("dff",)}
    ties_embeddings: ClassVar[bool] = True
    head_bias: ClassVar[bool] = True
    default_eps: ClassVar[float] = 1e-6

    def make_positions(self, context: BuildContext, prefix: str) -> FixedPositions:
        size = self.hidden_size()
        if size % 2:
            raise UnsupportedModel(f"config.json: n_embd = {size}: must be even")
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return FixedPositions(context, 10_000.0**-exponents)

    def token_vectors(self, ids: Tensor) -> Tensor:
        return self.context.ops.scale(self.embed(ids), self.hidden_size() ** 0.5)

    def make_norm(self, context: BuildContext, name: str) -> LayerNorm:
        """The config's epsilon is that of the last one; the blocks' is fixed."""
        last = name.endswith(self.names.final_norm)
        return LayerNorm(context, name, self.hidden_size(), self.norm_eps() if last else 1e-6)

    def activation(self) -> str:
        return "relu"
