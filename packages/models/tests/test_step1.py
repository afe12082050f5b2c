"""Step 1, beside a plain module."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from plain_reference import (
    PlainConformance,
    PlainDecoder,
    PlainMLP,
    Weight,
    attended,
    linear,
    rms_norm,
)
from torch import Tensor, nn

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint


class PlainAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, self.heads = config.hidden_size, config.num_attention_heads
        self.size = hidden // self.heads
        rows = config.num_attention_groups * self.size
        self.q_proj, self.o_proj = linear(hidden, hidden), linear(hidden, hidden)
        self.k_proj, self.v_proj = linear(hidden, rows), linear(hidden, rows)

    def bias(self, length: int) -> Tensor:
        """[heads, L, L]: of six heads four are of the series for four, two of that for eight."""
        slopes = [2.0 ** (-2 * i) for i in range(1, 5)] + [2.0**-1, 2.0**-3]
        distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
        return -torch.tensor(slopes)[:, None, None] * distance.sqrt()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.size))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        bias = self.bias(x.shape[0])
        return self.o_proj(attended(query, key, value, self.size**-0.5, bias=bias).flatten(1))


class PlainLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.eps, self.self_attn = config.rms_norm_eps, PlainAttention(config)
        self.mlp = PlainMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.input_layernorm.weight, self.eps))
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps))


class TestStep1(PlainConformance):
    """Six heads, which are no power of two, in two groups."""

    published = "Step1ForCausalLM"
    flips_ties = False
    settings: ClassVar[dict[str, Any]] = {
        "vocab_size": 131, "hidden_size": 72, "num_hidden_layers": 3, "intermediate_size": 68,
        "num_attention_heads": 6, "num_attention_groups": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip

    def module(self, config: Any) -> nn.Module:
        layers: list[nn.Module] = [PlainLayer(config) for _ in range(config.num_hidden_layers)]
        return PlainDecoder(config, layers)

    def test_no_table_of_a_billion_heads(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match="2147483646 heads with ALiBi: must be at most"):
            self.open(checkpoint.path, hf_overrides={"num_attention_heads": 2**31 - 2})
