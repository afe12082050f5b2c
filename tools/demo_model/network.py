"""A Llama in plain torch, with the parameter names and the arithmetic of the Hugging Face one.

It exists so that training needs nothing but torch, and so that what is trained is, name by name,
what `model.safetensors` must hold.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes; the names are those of `config.json`."""

    vocab_size: int = 1280
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32 whatever comes in, as Llama's is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Causal attention with grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size, width = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(size, shape.num_attention_heads * width, bias=False)
        self.k_proj = nn.Linear(size, shape.num_key_value_heads * width, bias=False)
        self.v_proj = nn.Linear(size, shape.num_key_value_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * width, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        query = rotate(self._heads(self.q_proj(x)), cos, sin)
        key = rotate(self._heads(self.k_proj(x)), cos, sin).repeat_interleave(groups, dim=1)
        value = self._heads(self.v_proj(x)).repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        return x.view(rows, length, -1, self.shape.head_dim).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on halves (not on even and odd places): `rotate_half`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """Token ids to the hidden states before the output head, which is the embedding once more."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_position_embeddings, dtype=torch.float32),
            1.0 / shape.rope_theta**steps,
        ).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(self._start_small)

    def _start_small(self, module: nn.Module) -> None:
        """Normal weights; those that write to the residual stream shrink with the depth."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                deep = name in ("o_proj", "down_proj")
                scale = 1 / math.sqrt(2 * self.shape.num_hidden_layers) if deep else 1.0
                nn.init.normal_(child.weight, std=0.04 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[:length], self.sin[:length]
        if torch.is_autocast_enabled("cpu"):
            cos, sin = cos.bfloat16(), sin.bfloat16()
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)
