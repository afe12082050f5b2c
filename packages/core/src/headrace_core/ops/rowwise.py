"""Ops on rows of activations: embedding, norms, activations, routing. Letters: :mod:`headrace_core.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""``gelu`` is exact (erf); ``gelu_tanh`` the tanh approximation; ``relu2`` is relu squared."""

GATED_ACTIVATIONS = (*ACTIVATIONS, "clamped_swiglu")
"""Activations between a gate and its input. ``clamped_swiglu`` exists only as such:
``(up + 1) * gate * sigmoid(CLAMPED_SWIGLU_ALPHA * gate)`` with the gate at most
``CLAMPED_SWIGLU_LIMIT`` and up within plus and minus that. OpenAI 2025, arXiv:2508.10925."""

CLAMPED_SWIGLU_ALPHA = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0

OPENINGS = ("silu", "sigmoid", "softplus")
"""Functions that :class:`GateOp` may apply to a gate."""

SCORINGS = ("softmax", "sigmoid", "sparsemixer")
"""Functions from a router's outputs to expert scores; :class:`RouteExpertsOp` defines each."""


class EmbeddingOp(Protocol):
    def __call__(self, ids: Tensor, weight: Tensor, *, beyond: int | None = None) -> Tensor:
        """Rows of a table: ids [T] int64, weight [V, H] -> [T, H]. ids are within [0, V); with
        ``beyond``, 0 to V - 1, others get that row."""


class RMSNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * (weight + offset)``, x [..., H], weight [H] -> [..., H].

        Source: Zhang & Sennrich 2019, arXiv:1910.07467. ``offset`` 1.0 is Gemma's form.
        """


class AddRMSNormOp(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns (rms_norm(s), s). The caller gives up both inputs.

        x, residual [T, H]. The sum is rounded to the input's dtype before it is normalised.
        """


class LayerNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, x [..., H]."""


class AddLayerNormOp(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns (layer_norm(s), s). The caller gives up both inputs.

        x, residual [T, H]. The sum is rounded to the input's dtype before it is normalised.
        """


class ActivationOp(Protocol):
    def __call__(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise ``kind`` of :data:`ACTIVATIONS`, any shape."""


class ActivationAndMulOp(Protocol):
    def __call__(self, x: Tensor, kind: str) -> Tensor:
        """``act(x[..., :I]) * x[..., I:]``: x [T, 2I] -> [T, I]; ``kind`` of :data:`GATED_ACTIVATIONS`."""


class AddOp(Protocol):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``, both [T, H] and of one dtype."""


class GateOp(Protocol):
    def __call__(self, x: Tensor, gate: Tensor, *, activation: str | None = None) -> Tensor:
        """``x act(gate)``: x, gate [T, H] of one dtype, whose rows may lie apart -> [T, H].

        ``activation`` is of :data:`OPENINGS`; None: the gate as it is. In float32, rounded once. A
        gate [T, G] with G below H that divides it opens H / G neighbours with each of its values.
        """


class ScaleOp(Protocol):
    def __call__(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``, x [T, H]; the factor is float32, the product is rounded once."""


class CopyRowsOp(Protocol):
    def __call__(self, x: Tensor, out: Tensor) -> None:
        """out = x, both [T, H] or both [T, A, B] and of one dtype; the last dimension's values lie side by
        side, everything else may lie apart.

        ``out`` is a part of something larger: so rows are joined, and dimensions change places.
        """


class ToFloat32Op(Protocol):
    def __call__(self, x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
        """x [T, V] as float32; with ``soft_cap`` t > 0, ``t * tanh(x / t)``. May be x itself."""


class RouteExpertsOp(Protocol):
    def __call__(
        self,
        x: Tensor,
        k: int,
        *,
        scoring: str = "softmax",
        bias: Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        renormalise: bool = False,
        scale: float = 1.0,
        jitter: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The k experts of each row: x [T, E] -> weights [T, k] float32, ids [T, k] int64, best first;
        of equals, the lower id. 1 <= k <= E.

        Scores are a ``softmax`` over all experts or a ``sigmoid`` of each. Chosen by score plus
        ``bias`` [E] float32 if given, among the ``top_groups`` of ``num_groups`` equal runs of experts;
        a group counts as much as its best expert (``group_score`` ``max``) or as its best two together
        (``top2``). Weights are the chosen experts' scores without bias, divided by their sum (at least
        1e-20) with ``renormalise``, times ``scale``. Sources: Dai et al. 2024, arXiv:2401.06066;
        DeepSeek-AI 2024, arXiv:2412.19437.

        ``sparsemixer``: the k largest x in turn; an expert's weight is its share in a softmax over those
        experts not taken before it whose x is less than its own by at most ``2 * jitter * max(|x|, own)``.
        Without groups and bias. Source: Liu et al. 2024, arXiv:2409.12136.
        """
