"""Gated experts."""

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
        first, second = self._pack_all(gate_up), self._pack_all(down)
        return PackedLinear(
            in_features=hidden,
            out_features=hidden,
            dtype=NAMES[dtype],
            data=(
                first, _kept(gate_up_bias), second, _kept(down_bias), experts, intermediate,
            ),
            num_bytes=first.numel() + second.numel(),
        )  # fmt: skip

    def _pack_all(self, weight: Tensor) -> Tensor:
        """[E, N, K] -> [E, bytes] uint8, each expert packed as a linear weight."""
        experts, out_features, in_features = weight.shape
        code = dtype_code(weight.dtype)
        num_bytes = self._library.linear_packed_bytes(out_features, in_features, code)
        data = packed_buffer(experts * num_bytes).view(experts, num_bytes)
        for expert in range(experts):
            rows, _, stride = matrix(weight[expert])
            self._library.linear_pack(
                data[expert].data_ptr(), rows.data_ptr(), out_features, in_features, stride, code
            )
        return data

    def __call__(
        self, x: Tensor, packed: PackedLinear, topk_weights: Tensor, topk_ids: Tensor, kind: str
    ) -> Tensor:
        x, rows, stride = matrix(x)
        dtype, (tokens, top_k) = x.dtype, topk_ids.shape
        if x.shape[1] != packed.in_features or NAMES.get(dtype) != packed.dtype:
            raise ConfigError(mismatch("moe", x, packed))
        if tokens != rows or topk_weights.shape != topk_ids.shape:
            raise ConfigError(
                f"moe: x is {describe(x)}, topk_ids {describe(topk_ids)}, topk_weights "
                f"{describe(topk_weights)}"
            )
        gate_up, gate_up_bias, down, down_bias, experts, intermediate = packed.data
        weights, ids = topk_weights.float().contiguous(), int64(topk_ids)
        out = torch.empty(rows, packed.out_features, dtype=dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), gate_up.data_ptr(), _pointer(gate_up_bias),
            down.data_ptr(), _pointer(down_bias), weights.data_ptr(), ids.data_ptr(), rows, top_k,
            experts, packed.in_features, intermediate, stride, gate_code(kind), CODES[dtype],
        )  # fmt: skip
        if status:
            raise IndexError(f"moe: a routed expert is outside [0, {experts})")
        return out


def _kept(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone().contiguous()


def _pointer(bias: Tensor | None) -> int | None:
    return None if bias is None else bias.data_ptr()
