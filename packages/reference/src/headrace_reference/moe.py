"""Experts: gated ones, summed, and single linear layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.ops import PackedLinear
from headrace_reference.activations import activation_and_mul
from headrace_reference.dtypes import unset_like, widened
from headrace_reference.linear import dtype_name


class MoE:
    """See :class:`headrace_core.ops.MoEOp`. Packing keeps the weights as they are."""

    pack_copies = False

    def pack(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> PackedLinear:
        return PackedLinear(
            in_features=gate_up.shape[2],
            out_features=down.shape[1],
            dtype=dtype_name(gate_up),
            data=(gate_up, down, gate_up_bias, down_bias),
            num_bytes=(gate_up.numel() + down.numel()) * gate_up.element_size(),
        )

    def __call__(
        self,
        x: Tensor,
        packed: PackedLinear,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        kind: str,
        *,
        identities: int = 0,
        identity_scale: float = 1.0,
    ) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = packed.data
        experts = gate_up.shape[0]
        chosen = lines(x, topk_ids, packed.out_features)
        for expert, rows, places in chosen_experts(topk_ids, experts + identities):
            if expert >= experts:
                chosen[rows, places] = x[rows].to(chosen.dtype) * identity_scale
                continue
            inner = F.linear(x[rows], gate_up[expert], _of(gate_up_bias, expert))
            hidden = activation_and_mul(inner, kind)
            result = F.linear(hidden, down[expert], _of(down_bias, expert))
            chosen[rows, places] = result.to(chosen.dtype)
        return summed(chosen, topk_weights).to(x.dtype)


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
        return unset_like(x, x.shape[0], packed.out_features)


class ExpertLinear:
    """See :class:`headrace_core.ops.ExpertLinearOp`. Packing keeps the weights as they are."""

    pack_copies = False

    def pack(self, weight: Tensor) -> PackedLinear:
        return PackedLinear(
            in_features=weight.shape[2],
            out_features=weight.shape[1],
            dtype=dtype_name(weight),
            data=weight,
            num_bytes=weight.numel() * weight.element_size(),
        )

    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        chosen = lines(x, ids, packed.out_features)
        for expert, rows, places in chosen_experts(ids, packed.data.shape[0]):
            own = x[rows] if x.dim() == 2 else x[rows, places]
            chosen[rows, places] = F.linear(own, packed.data[expert]).to(chosen.dtype)
        return (chosen if weights is None else summed(chosen, weights)).to(x.dtype)


class _FakeExpertLinear(ExpertLinear):
    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        rows = ids.shape if weights is None else ids.shape[:1]
        return unset_like(x, *rows, packed.out_features)


def lines(x: Tensor, ids: Tensor, width: int) -> Tensor:
    """A line for each row and place: [T, k, width] in the dtype of sums."""
    return widened(torch.zeros((*ids.shape, width), dtype=x.dtype, device=x.device))


def chosen_experts(ids: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, rows, places) of all that are chosen.

    Raises:
        IndexError: one of them is not within [0, count).
    """
    for expert in sorted(set(ids.flatten().tolist())):
        if not 0 <= expert < count:
            raise IndexError(f"expert {expert} is outside [0, {count})")
        yield expert, *(ids == expert).nonzero(as_tuple=True)


def summed(chosen: Tensor, weights: Tensor | None) -> Tensor:
    """[T, k, N] -> [T, N], in order: addition does not commute in bits."""
    out = torch.zeros_like(chosen[:, 0])
    for place in range(chosen.shape[1]):
        own = chosen[:, place]
        out += own if weights is None else weights[:, place, None] * own
    return out


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


moe = MoE()
expert_linear = ExpertLinear()
fake_moe = _FakeMoE()
fake_expert_linear = _FakeExpertLinear()
