"""``xielu``: xIELU, an activation with a square above 0 and an exponential below (Apertus)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class XIELUOp(Protocol):
    def __call__(
        self, x: Tensor, alpha_p: float, alpha_n: float, *, beta: float = 0.5, eps: float = -1e-6
    ) -> Tensor:
        """Elementwise, any shape: ``alpha_p * x^2 + beta * x`` above 0, else
        ``alpha_n * (expm1(min(x, eps)) - x) + beta * x``.

        The numbers are float32, the coefficients as used (not what is learned, whose softplus they
        are). Source: Huang & Schlag 2024, arXiv:2411.13010.
        """


XIELU: OptionalOp[XIELUOp] = OptionalOp("xielu")
