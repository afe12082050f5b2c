"""PLaMo 2, beside a plain module."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from plain_reference import (
    PlainConformance,
    Weight,
    attended,
    convolved,
    linear,
    rms_norm,
    rotated,
)
from torch import Tensor, nn


class PlainAttention(nn.Module):
    def __init__(self, config: Any, whole: bool) -> None:
        super().__init__()
        self.config, self.whole = config, whole
        size, heads = config.hidden_size_per_head, config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.qkv_proj = linear(config.hidden_size, (heads + 2 * self.kv_heads) * size)
        self.o_proj = linear(heads * size, config.hidden_size)
        self.q_weight = nn.Parameter(torch.ones(heads, size))
        self.k_weight = nn.Parameter(torch.ones(self.kv_heads, size))

    def forward(self, x: Tensor) -> Tensor:
        size, theta = self.config.hidden_size_per_head, self.config.rope_theta
        heads = self.qkv_proj(x).unflatten(-1, (-1, size))
        query, key, value = heads.split([*self.q_weight.shape[:1], self.kv_heads, self.kv_heads], 1)
        query = rotated(rms_norm(query, self.q_weight), theta)
        key = rotated(rms_norm(key, self.k_weight), theta)
        window = None if self.whole else self.config.attention_window_size + 1
        return self.o_proj(attended(query, key, value, size**-0.5, window=window).flatten(1))


class PlainMamba(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.rank = config, max(64, config.hidden_size // 16)
        heads, length = config.mamba_num_heads, config.mamba_d_state
        channels = heads * config.hidden_size_per_head
        self.in_proj = linear(config.hidden_size, 2 * channels)
        self.conv1d = Weight(channels, 1, config.mamba_d_conv)
        self.bcdt_proj = linear(channels, self.rank + 2 * length)
        self.dt_proj = linear(self.rank, heads)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.D = nn.Parameter(torch.ones(heads))
        self.dt_norm_weight = nn.Parameter(torch.ones(self.rank))
        self.B_norm_weight = nn.Parameter(torch.ones(length))
        self.C_norm_weight = nn.Parameter(torch.ones(length))
        self.out_proj = linear(channels, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        heads, length, eps = (
            self.config.mamba_num_heads, self.config.mamba_d_state, self.config.rms_norm_eps,
        )  # fmt: skip
        gate, inner = self.in_proj(x).unflatten(-1, (heads, -1)).chunk(2, dim=-1)
        inner = convolved(inner.flatten(1), self.conv1d.weight)
        key, query, step = self.bcdt_proj(inner).split([length, length, self.rank], dim=-1)
        key, query = (
            rms_norm(key, self.B_norm_weight, eps),
            rms_norm(query, self.C_norm_weight, eps),
        )
        step = self.dt_proj(rms_norm(step, self.dt_norm_weight, eps)) + self.dt_bias
        steps, values = nn.functional.softplus(step), inner.unflatten(-1, (heads, -1))
        state, rows = torch.zeros(*values.shape[1:], length), []
        for t in range(x.shape[0]):
            decay = torch.exp(-steps[t] * self.A_log.exp())[:, None, None]
            state = decay * state + (steps[t, :, None] * values[t])[..., None] * key[t]
            rows.append((state * query[t]).sum(-1) + self.D[:, None] * values[t])
        return self.out_proj((torch.stack(rows) * nn.functional.silu(gate)).flatten(1))


class PlainMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class PlainLayer(nn.Module):
    def __init__(self, config: Any, mixer: nn.Module) -> None:
        super().__init__()
        self.eps, self.mixer, self.mlp = config.rms_norm_eps, mixer, PlainMLP(config)
        for name in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp"):
            setattr(self, f"{name}_norm", Weight(config.hidden_size))

    def norm(self, x: Tensor, name: str, offset: float = 1.0) -> Tensor:
        return rms_norm(x, getattr(self, f"{name}_norm").weight + offset, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.mixer(self.norm(x, "pre_mixer")), "post_mixer", 1 / 5)
        return x + self.norm(self.mlp(self.norm(x, "pre_mlp")), "post_mlp", 1 / 5**1.5)


class PlainStack(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            PlainLayer(config, self.mixer(config, i)) for i in range(config.num_hidden_layers)
        )

    @staticmethod
    def mixer(config: Any, index: int) -> nn.Module:
        if index % config.mamba_step == config.mamba_step // 2:
            return PlainAttention(config, index in config.full_attention_idx)
        return PlainMamba(config)


class PlainPlamo2(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = PlainStack(config)
        self.model.norm = Weight(config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers.layers:
            x = layer(x)
        x = rms_norm(x, self.model.norm.weight + 1, self.config.rms_norm_eps)
        if self.config.tie_word_embeddings:
            return x @ self.model.embed_tokens.weight.T
        return self.lm_head(x)


class TestPlamo2(PlainConformance):
    """Both kinds of attention, windows shorter than the prompt, heads of other sizes than hidden size
    over heads."""

    published = "Plamo2ForCausalLM"
    settings: ClassVar[dict[str, Any]] = {
        "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 4, "intermediate_size": 68,
        "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_head": 14,
        "mamba_num_heads": 6, "mamba_d_state": 10, "mamba_d_conv": 3, "mamba_step": 2,
        "attention_window_size": 9, "full_attention_idx": [3], "rope_theta": 5000.0,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 128,
    }  # fmt: skip

    def module(self, config: Any) -> nn.Module:
        return PlainPlamo2(config)
