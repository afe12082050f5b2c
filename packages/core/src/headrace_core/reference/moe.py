"""Mixture of gated experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_core.ops import PackedLinear
from headrace_core.reference.activations import activation_and_mul
from headrace_core.reference.dtypes import widened
from headrace_core.reference.linear import dtype_name


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
        self, x: Tensor, packed: PackedLinear, topk_weights: Tensor, topk_ids: Tensor, kind: str
    ) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = packed.data
        shape = (*topk_ids.shape, packed.out_features)
        chosen = widened(torch.zeros(shape, dtype=x.dtype, device=x.device))  # [T, k, H]
        for expert in sorted(set(topk_ids.flatten().tolist())):
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            inner = F.linear(x[rows], gate_up[expert], _of(gate_up_bias, expert))
            hidden = activation_and_mul(inner, kind)
            result = F.linear(hidden, down[expert], _of(down_bias, expert))
            chosen[rows, places] = result.to(chosen.dtype)
        out = torch.zeros_like(chosen[:, 0])
        for place in range(topk_ids.shape[1]):  # in order: addition does not commute in bits
            out += topk_weights[:, place, None] * chosen[:, place]
        return out.to(x.dtype)


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


moe = MoE()
