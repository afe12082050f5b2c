"""Layers as quantizers write them, made by an independent packer: for tests that make checkpoints.

Every function gives a layer's tensors by suffix, and the weight [N, K] float32 that they mean.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_groups(
    weight: Tensor, bits: int, group_size: int, *, symmetric: bool, g_idx: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> (q [N, K] int64, zero points [N, G] int64, scales [N, G] float16), which mean
    ``(q - z) * scale``.

    Args:
        group_size: inputs of each group.
        symmetric: all zero points are the middle, ``2 ** (bits - 1)``.
        g_idx: [K], the group of each input.
    """
    top, (rows, inputs) = 2**bits - 1, weight.shape
    groups = inputs // group_size
    q = torch.zeros(rows, inputs, dtype=torch.int64)
    z = torch.zeros(rows, groups, dtype=torch.int64)
    scales = torch.zeros(rows, groups, dtype=torch.float16)
    for group in range(groups):
        mine = g_idx == group
        block = weight[:, mine]
        low, high = block.amin(1).clamp(max=0), block.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        step = ((high - low) / top).clamp(min=1e-4).half()
        zero = (
            torch.full((rows,), 2 ** (bits - 1))
            if symmetric
            else (-low / step.float()).round().clamp(0, top).long()
        )
        scales[:, group], z[:, group] = step, zero
        q[:, mine] = ((block / step.float()[:, None]).round().long() + zero[:, None]).clamp(0, top)
    return q, z, scales


def words(values: Tensor, bits: int) -> Tensor:
    """Each row [C] of values as one run of bits, lowest first: [R, C * bits / 32] int32."""
    run = torch.zeros(values.shape[0], values.shape[1] * bits, dtype=torch.int64)
    for bit in range(bits):
        run[:, bit::bits] = (values >> bit) & 1
    packed = (run.view(values.shape[0], -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def gptq_tensors(
    weight: Tensor,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    by_importance: bool = False,
    less_one: bool = True,
) -> tuple[dict[str, Tensor], Tensor]:
    """As GPTQModel writes a layer.

    Args:
        by_importance: inputs belong to groups in no order, always the same for one K (``desc_act``).
        less_one: zero points are stored less 1 (``gptq``), else as they are (``gptq_v2``).
    """
    g_idx = torch.arange(weight.shape[1]) // group_size
    if by_importance:
        g_idx = g_idx[torch.randperm(len(g_idx), generator=torch.Generator().manual_seed(3))]
    q, z, scales = rounded_groups(weight, bits, group_size, symmetric=symmetric, g_idx=g_idx)
    stored = (z - 1) % 2**bits if less_one else z
    return {
        "qweight": words(q, bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": g_idx.int(),
    }, (q - z[:, g_idx]).float() * scales.float()[:, g_idx]


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_tensors(weight: Tensor, *, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoAWQ writes a layer (version ``gemm``)."""
    g_idx = torch.arange(weight.shape[1]) // group_size
    q, z, scales = rounded_groups(weight, 4, group_size, symmetric=False, g_idx=g_idx)

    def packed(values: Tensor) -> Tensor:
        eights = values.T.reshape(values.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return words(eights.reshape(values.shape[1], -1), 4)

    tensors = {"qweight": packed(q), "qzeros": packed(z), "scales": scales.T.contiguous()}
    return tensors, (q - z[:, g_idx]).float() * scales.float()[:, g_idx]
