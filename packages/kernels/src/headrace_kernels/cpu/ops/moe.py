"""Gated experts, and linear layers of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import PackedLinear
from headrace_kernels.cpu.library import Library
from headrace_kernels.cpu.memory import packed_buffer
from headrace_kernels.cpu.ops.arguments import (
    CODES,
    NAMES,
    describe,
    dtype_code,
    gate_code,
    int64,
    matrix,
    mismatch,
    pointer,
    routed_rows,
    weights_for,
)


class MoE:
    """See :class:`headrace_core.ops.MoEOp`; ``data`` is (gate_up, its bias, down, its bias, experts,
    intermediate).

    Raises:
        IndexError: a routed expert does not exist.
    """

    pack_copies = True

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.moe

    def pack(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> PackedLinear:
        experts, double, hidden = gate_up.shape
        dtype, intermediate = gate_up.dtype, double // 2
        for name, tensor, shape in (
            ("down", down, (experts, hidden, intermediate)),
            ("the bias of gate_up", gate_up_bias, (experts, double)),
            ("the bias of down", down_bias, (experts, hidden)),
        ):
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
                raise ConfigError(
                    f"moe: gate_up is {describe(gate_up)}, so {name} must be {NAMES.get(dtype)} "
                    f"{list(shape)}; it is {describe(tensor)}"
                )
        first, second = (_pack_all(self._library, weight) for weight in (gate_up, down))
        return PackedLinear(
            in_features=hidden,
            out_features=hidden,
            dtype=NAMES[dtype],
            data=(
                first, _kept(gate_up_bias), second, _kept(down_bias), experts, intermediate,
            ),
            num_bytes=first.numel() + second.numel(),
        )  # fmt: skip

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
        x, rows, stride = matrix(x)
        dtype, (tokens, top_k) = x.dtype, topk_ids.shape
        if x.shape[1] != packed.in_features or NAMES.get(dtype) != packed.dtype:
            raise ConfigError(mismatch("moe", x, packed))
        weights = weights_for("moe", topk_weights, topk_ids)
        if tokens != rows:
            raise ConfigError(f"moe: x is {describe(x)}, topk_ids {describe(topk_ids)}")
        gate_up, gate_up_bias, down, down_bias, experts, intermediate = packed.data
        ids = int64(topk_ids)
        out = torch.empty(rows, packed.out_features, dtype=dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), gate_up.data_ptr(), pointer(gate_up_bias),
            down.data_ptr(), pointer(down_bias), pointer(weights), ids.data_ptr(), rows, top_k,
            experts, packed.in_features, intermediate, stride, identities, identity_scale,
            gate_code(kind), CODES[dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"moe: a routed expert is outside [0, {experts + identities})")
        return out


class ExpertLinear:
    """See :class:`headrace_core.ops.ExpertLinearOp`; ``data`` is [E, bytes] uint8, each expert packed as
    a linear weight.

    Raises:
        IndexError: a routed expert does not exist.
    """

    pack_copies = True

    def __init__(self, library: Library) -> None:
        self._library, self._kernel = library, library.expert_linear

    def pack(self, weight: Tensor) -> PackedLinear:
        _, out_features, in_features = weight.shape
        data = _pack_all(self._library, weight)
        name = NAMES[weight.dtype]
        return PackedLinear(in_features, out_features, name, data, data.numel())

    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        rows, top_k = ids.shape
        x, share, stride = routed_rows("expert_linear", x, packed, ids)
        weights = weights_for("expert_linear", weights, ids)
        experts, ids = packed.data.shape[0], int64(ids)
        shape = (rows,) if weights is not None else (rows, top_k)
        out = torch.empty(*shape, packed.out_features, dtype=x.dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), packed.data.data_ptr(), pointer(weights),
            ids.data_ptr(), rows, top_k, share, experts, packed.out_features,
            packed.in_features, stride, CODES[x.dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"expert_linear: a routed expert is outside [0, {experts})")
        return out


def _pack_all(library: Library, weight: Tensor) -> Tensor:
    """[E, N, K] -> [E, bytes] uint8, each expert packed as a linear weight."""
    experts, out_features, in_features = weight.shape
    code = dtype_code(weight.dtype)
    num_bytes = library.linear_packed_bytes(out_features, in_features, code)
    data = packed_buffer(experts * num_bytes).view(experts, num_bytes)
    for expert in range(experts):
        rows, _, stride = matrix(weight[expert])
        library.linear_pack(
            data[expert].data_ptr(), rows.data_ptr(), out_features, in_features, stride, code
        )
    return data


def _kept(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone().contiguous()
