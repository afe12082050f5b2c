"""Ops of recurrent layers, which read and write a state for each request. Letters: :mod:`headrace_core.ops`;
besides, C channels, K taps, N length of a channel's state, P channels of a head, G groups of heads.

What all share: tokens of request b are rows ``cu_seqlens_q[b]:cu_seqlens_q[b + 1]``. Its recurrence
starts from block ``state_in[b]`` of ``state`` (-1: from zeros) and leaves its last state in block
``state_out[b]``; both [B] int64, see :class:`headrace_core.batch.GroupBatch`. ``state`` None is a
profiling run: all start from zeros and nothing is kept. Blocks may lie apart (dimension 0 of ``state``
has any stride). Token follows token in one fixed order, so a result does not depend on how a request is
cut into steps: the state is float32 and is written as it is; that of the convolution holds inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class CausalConvOp(Protocol):
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
        """Each channel by itself: the sum of its last K inputs, each times its tap.

        x [T, C] (rows may be apart), weight [C, K] with the tap of the token itself last, bias [C];
        state [N, C, K - 1] in x's dtype: the last inputs, oldest first. ``activation`` of
        :data:`headrace_core.ops.ACTIVATIONS` on the sum, in float32; None: none. Returns [T, C].
        """


class SelectiveScanOp(Protocol):
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
        """Mamba's scan. Gu and Dao 2023, arXiv:2312.00752.

        With ``s = softplus(dt + dt_bias)``: ``h <- exp(s a) h + s b x``, then ``y = c . h + d x``, and
        ``y silu(gate)`` if there is a gate. x, dt, gate [T, C]; a [C, N] float32, negative; b, c
        [T, N]; d, dt_bias [C] float32; state [*, C, N] float32. x, dt, gate, b and c may have rows
        that lie apart. Returns [T, C] in x's dtype.
        """


class StateSpaceScanOp(Protocol):
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
        """Mamba 2's scan, one number of decay for each head. Dao and Gu 2024, arXiv:2405.21060.

        With ``s = clamp(softplus(dt + dt_bias), *dt_limits)``, or 1 without dt: head h's
        ``S <- exp(s a) S + s x (x) b``, then ``y = S c + d x``. x [T, H, P], dt [T, H], a [H] float32,
        negative; b, c [T, G, N], of group ``h // (H // G)``; d, dt_bias [H] float32; state
        [*, H, P, N] float32. Without dt and d it is linear attention with a decay: c asks, b and x are
        key and value (Qin et al. 2024, arXiv:2401.04658). Rows may lie apart. Returns [T, H, P] in x's
        dtype.
        """


class DeltaRuleOp(Protocol):
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
        """The gated delta rule. Yang et al. 2024, arXiv:2412.06464; a decay for each channel of the
        key: Kimi Team 2025, arXiv:2510.26692.

        With ``g = -exp(a_log) softplus(gate + dt_bias)``, or with a ``lower_bound`` (negative)
        ``g = lower_bound sigmoid(exp(a_log) (gate + dt_bias))``, and ``w = beta_scale sigmoid(beta)``:
        ``S <- exp(g) S``, ``S <- S + w k (x) (v - S^T k)``, then ``o = scale S^T q``. query, key
        [T, Hk, N], value [T, Hv, P], value head h reads key head ``h // (Hv // Hk)``; gate and dt_bias
        [T, Hv] and [Hv], or [T, Hv, N] and [Hv, N] (then exp(g) scales the rows of S); beta [T, Hv];
        a_log [Hv] float32, dt_bias float32; state [*, Hv, N, P] float32. ``l2_norm_eps``: query and key
        are first divided by ``sqrt(sum of squares + eps)``. Rows may lie apart. Returns [T, Hv, P] in
        value's dtype.
        """


class GatedRMSNormOp(Protocol):
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
        """``norm(x) act(gate)`` if ``norm_first``, else ``norm(x act(gate))``: x, gate [T, H].

        The RMS is of each ``group_size`` values (None: all H), weight [H] or [group_size]. ``activation``
        is ``silu`` or ``sigmoid``. All in float32, rounded once.
        """
