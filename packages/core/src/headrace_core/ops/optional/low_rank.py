"""``low_rank``: what each row's own adapter adds to a linear layer's result (LoRA).

Source: Hu et al. 2021, arXiv:2106.09685; many adapters in a batch: Chen et al. 2023, arXiv:2310.18547.
Letters beside :mod:`headrace_core.ops`: S slots, P fused parts of a layer, r an adapter's rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class LowRankOp(Protocol):
    def allocate(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        out_parts: Sequence[int],
        like: Tensor,
    ) -> Any:
        """Memory for the adapters of one layer, all empty, with dtype and device of ``like``; its
        ``num_bytes`` says how much. It stays where it is."""

    def write(
        self, factors: Any, slot: int, part: int, down: Tensor, up: Tensor, scale: float
    ) -> None:
        """Fill one part of a slot: down [r, K], up [N of the part, r], r at most ``max_rank``; r = 0
        empties it. Any floating dtype."""

    def __call__(self, out: Tensor, x: Tensor, factors: Any, slots: Tensor) -> Tensor:
        """``out[t] + scale * up @ (down @ x[t])``, by part, of the adapter in slot ``slots[t]``.

        Args:
            out: [T, N]; changed, and returned. Rows of no adapter keep their bits.
            x: [T, K].
            slots: int32; its first T count; -1: none. Further ones are memory for larger steps.

        ``down @ x`` is kept in float32, and the sum is rounded once.
        """


LOW_RANK: OptionalOp[LowRankOp] = OptionalOp("low_rank")
