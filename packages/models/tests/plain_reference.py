"""The conformance suite for families that transformers has nothing like: beside a plain module, which is
written after the published model's definition and has its layout."""

from __future__ import annotations

import json
from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from huggingface_hub import save_torch_state_dict
from model_families_conformance import FamilyConformance
from torch import Tensor, nn

from headrace_testing.model.decoders import Checkpoint, randomise


class Plain:
    """A plain module in the place of a model of transformers."""

    def __init__(self, module: nn.Module, config: dict[str, Any]) -> None:
        self.module, self.config = module, config

    def __call__(self, ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.module(ids[0])[None])

    def save_pretrained(self, folder: Path, max_shard_size: str = "5GB") -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.clone() for name, tensor in self.module.state_dict().items()}
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)


class PlainConformance(FamilyConformance):
    """What is left for a family: its config, and the module."""

    published: ClassVar[str]
    """The architecture's name in ``config.json``."""
    settings: ClassVar[dict[str, Any]]
    """Of ``config.json``."""

    @abstractmethod
    def module(self, config: Any) -> nn.Module:
        """From ids [L] to logits [L, V]; its state is the checkpoint's."""

    def architecture(self) -> str:
        return self.published

    def hf_class(self) -> Any:
        return type(self)

    def hf_config(self, **overrides: Any) -> Any:
        return SimpleNamespace(**{**self.settings, **overrides})

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        config = {**self.settings, **overrides, "architectures": [self.published]}
        module = self.module(SimpleNamespace(**config)).eval()
        randomise(module, seed)
        plain = Plain(module, {"model_type": "remote", **config})
        plain.save_pretrained(folder)
        return Checkpoint(plain, folder)


def rms_norm(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6) -> Tensor:
    """Over the last axis."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float, size: int | None = None, interleaved: bool = False) -> Tensor:
    """x [L, heads, D], of which the first ``size`` dimensions turn by position."""
    size = x.shape[-1] if size is None else size
    frequencies = theta ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    turning, rest = x[..., :size], x[..., size:]
    if interleaved:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turning.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


def attended(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, window: int | None = None,
    bias: Tensor | None = None, prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """query [L, Hq, D] over keys [L, Hk, D] and values [L, Hk, V] up to its own -> [L, Hq, V].

    bias [Hq, L, L] is added; the keys and values of ``prefix`` [S, Hk, ...] are seen by all.
    """
    length, group = query.shape[0], query.shape[1] // key.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    wide_key, wide_value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, wide_key) * scale
    scores = (scores if bias is None else scores + bias).masked_fill(hidden, -torch.inf)
    if prefix is not None:
        first, more = (x.repeat_interleave(group, dim=1) for x in prefix)
        scores = torch.cat((torch.einsum("qhd,khd->hqk", query, first) * scale, scores), dim=-1)
        wide_value = torch.cat((more, wide_value))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_value)


def convolved(x: Tensor, weight: Tensor) -> Tensor:
    """x [L, C] with the last inputs, weight [C, 1, K], then SiLU."""
    taps = weight.shape[-1]
    padded = nn.functional.pad(x.T, (taps - 1, 0))
    out = nn.functional.conv1d(padded[None], weight, groups=x.shape[1])[0].T
    return nn.functional.silu(out)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


class Weight(nn.Module):
    """A module with a weight and nothing to compute."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class PlainMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, inner), linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainDecoder(nn.Module):
    """Embedding, layers, norm and an own head under Llama's names."""

    def __init__(self, config: Any, layers: list[nn.Module]) -> None:
        super().__init__()
        self.eps, self.model = config.rms_norm_eps, nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(layers)
        self.model.norm = Weight(config.hidden_size)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(rms_norm(x, self.model.norm.weight, self.eps))
