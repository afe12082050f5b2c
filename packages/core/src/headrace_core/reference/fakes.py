"""Shape-only versions of every op: outputs of the right shape, dtype and device, content unset.

For compilers and memory planning; they work on meta tensors, read no data and change no input.
Names and signatures are those of :mod:`headrace_core.reference`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import PackedLinear, TopLogprobs
from headrace_core.reference.linear import HeadLinear, Linear
from headrace_core.reference.moe import ExpertLinear, MoE
from headrace_core.reference.quantized import QuantLinear


def _like(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape or x.shape, dtype=x.dtype, device=x.device)


def embedding(ids: Tensor, weight: Tensor, *, beyond: int | None = None) -> Tensor:
    return _like(weight, ids.shape[0], weight.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    return _like(x)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _like(x)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def activation(x: Tensor, kind: str) -> Tensor:
    return _like(x)


def activation_and_mul(x: Tensor, kind: str) -> Tensor:
    return _like(x, *x.shape[:-1], x.shape[-1] // 2)


def add(x: Tensor, y: Tensor) -> Tensor:
    return _like(x)


def xielu(x: Tensor, alpha_p: float, alpha_n: float, **options: float) -> Tensor:
    return _like(x)


def scale(x: Tensor, factor: float) -> Tensor:
    return _like(x)


def gate(x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
    return _like(x, *x.shape)


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    return _like(x, *x.shape)


def copy_rows(x: Tensor, out: Tensor) -> None:
    return None


def mix(x: Tensor, weights: Tensor, residual: Tensor | None = None) -> Tensor:
    return _like(x, *weights.shape[:2], x.shape[2])


def match_rms(x: Tensor, like: Tensor, least: float) -> Tensor:
    return _like(x, *x.shape)


def gaussian_topk(x: Tensor, deviations: float) -> Tensor:
    return _like(x, *x.shape)


def to_float32(x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def route_experts(x: Tensor, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    weights = torch.empty((x.shape[0], k), dtype=torch.float32, device=x.device)
    return weights, torch.empty((x.shape[0], k), dtype=torch.int64, device=x.device)


def rotary(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
) -> None:
    return None


def cache_write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **options: Any,
) -> None:
    return None


def rotary_cache_write(*args: Any, **options: Any) -> None:
    return None


def paged_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(query, *query.shape)


def varlen_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(query, *query.shape)


def latent_cache_write(*args: Any, **options: Any) -> None:
    return None


def latent_attention(query: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(query, *query.shape)


def index_tokens(query: Tensor, *args: Any, top_k: int, **options: Any) -> Tensor:
    return torch.empty((query.shape[0], top_k), dtype=torch.int32, device=query.device)


def causal_conv(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(x, *x.shape)


def selective_scan(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(x, *x.shape)


def state_space_scan(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(x, *x.shape)


def delta_rule(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(value, *value.shape)


def rg_lru(x: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(x, *x.shape)


def wkv(key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(value, *value.shape)


def mlstm(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(value, *value.shape)


def gated_rms_norm(x: Tensor, gate: Tensor, *args: Any, **options: Any) -> Tensor:
    return _like(x, *x.shape)


def sample(
    logits: Tensor, temperature: Tensor, *settings: Tensor, keep_filtered: bool = False
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return (
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )


def top_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
) -> TopLogprobs:
    """As wide as it can be, since the counts are not read."""
    shape = (logits.shape[0], logits.shape[1] + 1)
    ids, ranks = (torch.empty(shape, dtype=torch.int64) for _ in range(2))
    return TopLogprobs(ids, torch.empty(shape), ranks, torch.empty(shape[0], dtype=torch.int64))


class _FakeLinear(Linear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return _like(x, x.shape[0], packed.out_features // 2)


class _FakeQuantLinear(QuantLinear):
    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        return _like(x, x.shape[0], packed.out_features // 2)

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        rows = ids.shape if weights is None else ids.shape[:1]
        return _like(x, *rows, packed.out_features)


class _FakeHeadLinear(HeadLinear):
    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return _like(x, *x.shape[:2], packed.out_features)


class _FakeMoE(MoE):
    def __call__(
        self,
        x: Tensor,
        packed: PackedLinear,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        kind: str,
        **options: float,
    ) -> Tensor:
        return _like(x, x.shape[0], packed.out_features)


class _FakeExpertLinear(ExpertLinear):
    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        rows = ids.shape if weights is None else ids.shape[:1]
        return _like(x, *rows, packed.out_features)


linear = _FakeLinear()
quant_linear = _FakeQuantLinear()
head_linear = _FakeHeadLinear()
moe = _FakeMoE()
expert_linear = _FakeExpertLinear()
