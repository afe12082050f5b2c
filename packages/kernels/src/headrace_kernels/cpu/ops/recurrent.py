"""Ops of recurrent layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_kernels.cpu.library import BAD_LENGTHS, Library
from headrace_kernels.cpu.ops.arguments import (
    activation_code,
    describe,
    dtype_code,
    int32,
    int64,
    matrix,
    unit_last,
    vector,
)
from headrace_kernels.cpu.ops.norms import norm_weight

MAX_TAPS = 64
"""Most inputs of a channel that a convolution's kernel has room for."""


class States(NamedTuple):
    """The states of one layer as kernels take them, and the tensors that must live meanwhile."""

    pointers: tuple[int | None, int | None, int | None, int]
    """State, in, out, cu_seqlens."""
    num_seqs: int
    blocks: int
    stride: int
    kept: tuple[Tensor, ...]


def states_for(
    op: str,
    state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
    cu_seqlens_q: Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> States:
    """Check what a kernel cannot.

    Args:
        shape: of one block's state, whose values lie side by side.

    Raises:
        ConfigError: another shape or dtype; indices that are missing or of another number.
    """
    cu = int32(cu_seqlens_q).contiguous()
    num_seqs = cu.shape[0] - 1
    if state is None:
        return States((None, None, None, cu.data_ptr()), num_seqs, 0, 0, (cu,))
    if state.shape[1:] != shape or state.dtype is not dtype or not _is_dense(state):
        raise ConfigError(
            f"{op}: state is {describe(state)} of strides {list(state.stride())}; it must be {dtype} "
            f"[N, {', '.join(map(str, shape))}], a block dense"
        )
    if (
        state_in is None
        or state_out is None
        or not (state_in.shape == state_out.shape == (num_seqs,))
    ):
        raise ConfigError(f"{op}: state_in and state_out must be int64 [{num_seqs}]")
    begin, end = int64(state_in), int64(state_out)
    pointers = (state.data_ptr(), begin.data_ptr(), end.data_ptr(), cu.data_ptr())
    return States(pointers, num_seqs, state.shape[0], state.stride(0), (cu, begin, end))


def _is_dense(state: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def raise_for(op: str, status: int, cu_seqlens_q: Tensor, tokens: int, blocks: int) -> None:
    """Raise what a kernel's status means.

    Raises:
        ConfigError: lengths contradict each other.
        IndexError: a state is beyond the blocks.
    """
    if status == BAD_LENGTHS:
        raise ConfigError(
            f"{op}: cu_seqlens_q {cu_seqlens_q.tolist()} does not rise from 0 within the {tokens} "
            "rows of its input"
        )
    if status:
        raise IndexError(f"{op}: a state is outside [0, {blocks})")


class CausalConv:
    """See :class:`headrace_core.ops.CausalConvOp`; fastest with a weight whose channels are dense."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.causal_conv

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        activation: str | None = None,
    ) -> Tensor:
        x, tokens, stride = matrix(x)
        channels, taps = weight.shape
        if x.shape[1] != channels or weight.dtype is not x.dtype or not 1 <= taps <= MAX_TAPS:
            raise ConfigError(
                f"causal_conv: x is {describe(x)}, weight is {describe(weight)}; they must be [T, C] "
                f"and [C, K] of one dtype, K from 1 to {MAX_TAPS}"
            )
        if bias is not None:
            bias = vector(bias, x.dtype, channels, "causal_conv: bias")
        states = states_for(
            "causal_conv", state, state_in, state_out, cu_seqlens_q, (channels, taps - 1), x.dtype
        )
        out = torch.empty(tokens, channels, dtype=x.dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), *states.pointers, states.num_seqs, tokens,
            channels, taps, stride, *weight.stride(), states.blocks, states.stride,
            -1 if activation is None else activation_code(activation), dtype_code(x.dtype),
        )  # fmt: skip
        raise_for("causal_conv", status, cu_seqlens_q, tokens, states.blocks)
        return out


class SelectiveScan:
    """See :class:`headrace_core.ops.SelectiveScanOp`; fastest with rates whose channels are dense."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.selective_scan

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        dt_bias: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        x, tokens, x_row = matrix(x)
        channels, length = a.shape
        _expect("selective_scan", x, (tokens, channels), dt=dt, **_given(gate=gate))
        _expect("selective_scan", x, (tokens, length), b=b, c=c)
        dt, _, dt_row = matrix(dt)
        b, _, b_row = matrix(b)
        c, _, c_row = matrix(c)
        gate_row = 0
        if gate is not None:
            gate, _, gate_row = matrix(gate)
        a, skip = _float32("selective_scan: a", a), vector(d, torch.float32, channels, "d")
        if dt_bias is not None:
            dt_bias = vector(dt_bias, torch.float32, channels, "dt_bias")
        states = states_for(
            "selective_scan", state, state_in, state_out, cu_seqlens_q, (channels, length),
            torch.float32,
        )  # fmt: skip
        out = torch.empty(tokens, channels, dtype=x.dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), dt.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(),
            skip.data_ptr(), _address(dt_bias), _address(gate), *states.pointers, states.num_seqs,
            tokens, channels, length, x_row, dt_row, b_row, c_row, gate_row, *a.stride(),
            states.blocks, states.stride, dtype_code(x.dtype),
        )  # fmt: skip
        raise_for("selective_scan", status, cu_seqlens_q, tokens, states.blocks)
        return out


class StateSpaceScan:
    """See :class:`headrace_core.ops.StateSpaceScanOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.state_space_scan

    def __call__(
        self,
        x: Tensor,
        dt: Tensor | None,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        dt_bias: Tensor | None = None,
        dt_limits: tuple[float, float] = (0.0, float("inf")),
    ) -> Tensor:
        x, b, c = unit_last(x), unit_last(b), unit_last(c)
        (tokens, heads, size), (groups, length) = x.shape, b.shape[1:]
        if heads % groups:
            raise ConfigError(f"state_space_scan: {heads} heads in {groups} groups")
        _expect("state_space_scan", x, (tokens, groups, length), b=b, c=c)
        dt_row = 0
        if dt is not None:
            _expect("state_space_scan", x, (tokens, heads), dt=dt)
            dt, _, dt_row = matrix(dt)
        a = vector(a, torch.float32, heads, "state_space_scan: a")
        d, dt_bias = (
            None if v is None else vector(v, torch.float32, heads, "state_space_scan: d or dt_bias")
            for v in (d, dt_bias)
        )
        states = states_for(
            "state_space_scan", state, state_in, state_out, cu_seqlens_q, (heads, size, length),
            torch.float32,
        )  # fmt: skip
        out = torch.empty(tokens, heads, size, dtype=x.dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), _address(dt), a.data_ptr(), b.data_ptr(), c.data_ptr(),
            _address(d), _address(dt_bias), *states.pointers, states.num_seqs, tokens, heads, size,
            groups, length, *x.stride()[:2], dt_row, *b.stride()[:2], *c.stride()[:2],
            states.blocks, states.stride, *dt_limits, dtype_code(x.dtype),
        )  # fmt: skip
        raise_for("state_space_scan", status, cu_seqlens_q, tokens, states.blocks)
        return out


class DeltaRule:
    """See :class:`headrace_core.ops.DeltaRuleOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.delta_rule

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gate: Tensor,
        beta: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        scale: float,
        l2_norm_eps: float | None = None,
        beta_scale: float = 1.0,
        lower_bound: float | None = None,
    ) -> Tensor:
        query, key, value, gate = (unit_last(x) for x in (query, key, value, gate))
        (tokens, heads, size), (key_heads, length) = value.shape, key.shape[1:]
        if heads % key_heads:
            raise ConfigError(f"delta_rule: {heads} value heads of {key_heads} key heads")
        if lower_bound is not None and lower_bound >= 0:
            raise ConfigError(f"delta_rule: lower_bound = {lower_bound}: must be negative, or None")
        by_channel = gate.dim() == 3
        gates = (heads, length) if by_channel else (heads,)
        _expect("delta_rule", value, (tokens, key_heads, length), query=query, key=key)
        _expect("delta_rule", value, (tokens, *gates), gate=gate)
        _expect("delta_rule", value, (tokens, heads), beta=beta)
        beta, _, beta_row = matrix(beta)
        a_log = vector(a_log, torch.float32, heads, "delta_rule: a_log")
        bias = _float32("delta_rule: dt_bias", dt_bias).contiguous()
        if bias.shape != gates:
            raise ConfigError(f"delta_rule: dt_bias is {describe(bias)}; it must be {list(gates)}")
        states = states_for(
            "delta_rule", state, state_in, state_out, cu_seqlens_q, (heads, length, size),
            torch.float32,
        )  # fmt: skip
        out = torch.empty(tokens, heads, size, dtype=value.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), gate.data_ptr(),
            beta.data_ptr(), a_log.data_ptr(), bias.data_ptr(), *states.pointers, states.num_seqs,
            tokens, key_heads, heads, length, size, *query.stride()[:2], *key.stride()[:2],
            *value.stride()[:2], gate.stride(0), gate.stride(1), beta_row, states.blocks,
            states.stride, scale, -1.0 if l2_norm_eps is None else l2_norm_eps, beta_scale,
            0.0 if lower_bound is None else lower_bound, int(by_channel), dtype_code(value.dtype),
        )  # fmt: skip
        raise_for("delta_rule", status, cu_seqlens_q, tokens, states.blocks)
        return out


class RGLRU:
    """See :class:`headrace_core.ops.optional.rg_lru.RGLRUOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.rg_lru

    def __call__(
        self,
        x: Tensor,
        input_gate: Tensor,
        decay_gate: Tensor,
        decay: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        input_bias: Tensor,
        decay_bias: Tensor,
    ) -> Tensor:
        _expect("rg_lru", x, tuple(x.shape), input_gate=input_gate, decay_gate=decay_gate)
        x, tokens, x_row = matrix(x)
        input_gate, _, input_row = matrix(input_gate)
        decay_gate, _, decay_row = matrix(decay_gate)
        channels = x.shape[1]
        decay, input_bias, decay_bias = (
            vector(v, torch.float32, channels, "rg_lru: decay or a bias")
            for v in (decay, input_bias, decay_bias)
        )
        states = states_for(
            "rg_lru", state, state_in, state_out, cu_seqlens_q, (channels,), torch.float32
        )
        out = torch.empty(tokens, channels, dtype=x.dtype)
        status = self._kernel(
            out.data_ptr(), x.data_ptr(), input_gate.data_ptr(), decay_gate.data_ptr(),
            decay.data_ptr(), input_bias.data_ptr(), decay_bias.data_ptr(), *states.pointers,
            states.num_seqs, tokens, channels, x_row, input_row, decay_row, states.blocks,
            states.stride, dtype_code(x.dtype),
        )  # fmt: skip
        raise_for("rg_lru", status, cu_seqlens_q, tokens, states.blocks)
        return out


class WKV:
    """See :class:`headrace_core.ops.optional.wkv.WKVOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.wkv

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        first: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
    ) -> Tensor:
        _expect("wkv", value, tuple(value.shape), key=key)
        key, tokens, key_row = matrix(key)
        value, _, value_row = matrix(value)
        channels = value.shape[1]
        decay, first = (vector(v, torch.float32, channels, "wkv: decay") for v in (decay, first))
        states = states_for(
            "wkv", state, state_in, state_out, cu_seqlens_q, (3, channels), torch.float32
        )
        out = torch.empty(tokens, channels, dtype=value.dtype)
        status = self._kernel(
            out.data_ptr(), key.data_ptr(), value.data_ptr(), decay.data_ptr(), first.data_ptr(),
            *states.pointers, states.num_seqs, tokens, channels, key_row, value_row, states.blocks,
            states.stride, dtype_code(value.dtype),
        )  # fmt: skip
        raise_for("wkv", status, cu_seqlens_q, tokens, states.blocks)
        return out


class MLSTM:
    """See :class:`headrace_core.ops.optional.mlstm.MLSTMOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.mlstm

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        input_gate: Tensor,
        forget_gate: Tensor,
        state: Tensor | None,
        state_in: Tensor | None,
        state_out: Tensor | None,
        cu_seqlens_q: Tensor,
        *,
        scale: float,
        eps: float,
    ) -> Tensor:
        query, key, value = (unit_last(x) for x in (query, key, value))
        (tokens, heads, size), length = value.shape, key.shape[2]
        _expect("mlstm", value, (tokens, heads, length), query=query, key=key)
        gates = [_float32("mlstm: a gate", gate) for gate in (input_gate, forget_gate)]
        if any(gate.shape != (tokens, heads) for gate in gates):
            raise ConfigError(f"mlstm: gates must be [{tokens}, {heads}]")
        (opens, _, input_row), (keeps, _, forget_row) = (matrix(gate) for gate in gates)
        states = states_for(
            "mlstm", state, state_in, state_out, cu_seqlens_q,
            (heads, length * size + length + 1), torch.float32,
        )  # fmt: skip
        out = torch.empty(tokens, heads, size, dtype=value.dtype)
        status = self._kernel(
            out.data_ptr(), query.data_ptr(), key.data_ptr(), value.data_ptr(), opens.data_ptr(),
            keeps.data_ptr(), *states.pointers, states.num_seqs, tokens, heads, length, size,
            *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], input_row, forget_row,
            states.blocks, states.stride, scale, eps, dtype_code(value.dtype),
        )  # fmt: skip
        raise_for("mlstm", status, cu_seqlens_q, tokens, states.blocks)
        return out


class GatedRMSNorm:
    """See :class:`headrace_core.ops.GatedRMSNormOp`."""

    def __init__(self, library: Library) -> None:
        self._kernel = library.gated_rms_norm

    def __call__(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor,
        eps: float,
        *,
        group_size: int | None = None,
        norm_first: bool,
        activation: str = "silu",
    ) -> Tensor:
        _expect("gated_rms_norm", x, tuple(x.shape), gate=gate)
        x, rows, stride = matrix(x)
        gate, _, gate_stride = matrix(gate)
        width = x.shape[1]
        size = group_size or width
        if width % size or activation not in ("silu", "sigmoid"):
            raise ConfigError(
                f"gated_rms_norm: {width} values in groups of {size}, activation {activation!r}: "
                "groups must be equal, the activation silu or sigmoid"
            )
        shared = weight.shape[0] == size != width
        weight, weight_code = norm_weight(weight, x.dtype, size if shared else width)
        out = torch.empty(rows, width, dtype=x.dtype)
        self._kernel(
            out.data_ptr(), x.data_ptr(), gate.data_ptr(), weight.data_ptr(), rows, width // size,
            size, stride, gate_stride, 0 if shared else size, eps, int(norm_first),
            int(activation == "sigmoid"), dtype_code(x.dtype), weight_code,
        )  # fmt: skip
        return out


def _expect(op: str, like: Tensor, shape: tuple[int, ...], **tensors: Tensor) -> None:
    """Every one of the tensors has this shape and ``like``'s dtype."""
    for name, x in tensors.items():
        if x.shape != shape or x.dtype is not like.dtype:
            raise ConfigError(
                f"{op}: {name} is {describe(x)}; it must be {like.dtype} {list(shape)}"
            )


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if x is not None}


def _float32(name: str, x: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise ConfigError(f"{name} is {describe(x)}; it must be float32")
    return x


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
