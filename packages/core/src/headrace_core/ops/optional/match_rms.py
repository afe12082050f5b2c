"""``match_rms``: rows scaled to the RMS of other rows (Gemma 3n)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class MatchRMSOp(Protocol):
    def __call__(self, x: Tensor, like: Tensor, least: float) -> Tensor:
        """``x sqrt(mean(like^2) / max(mean(x^2), least))``: each row of x as large as that of ``like``,
        both [T, H]."""


MATCH_RMS: OptionalOp[MatchRMSOp] = OptionalOp("match_rms")
