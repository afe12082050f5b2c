"""``key_share``: one rank's part of each sequence's tokens (decode context parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_core.ops.registry import OptionalOp

if TYPE_CHECKING:
    from torch import Tensor


class KeyShareOp(Protocol):
    def __call__(
        self, cu_seqlens_q: Tensor, seq_lens: Tensor, slot_mapping: Tensor, *,
        rank: int, ranks: int, interleave: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """A batch as a rank sees it that keeps tokens i with ``i // interleave % ranks == rank``.

        Args:
            cu_seqlens_q: [B + 1] int32, rising within T; tokens behind its last belong to no request.
            seq_lens: [B] int32, keys of all ranks, this step's included.
            slot_mapping: [T] int64, slots in blocks of n * ranks * interleave tokens; negative: nowhere.

        Returns:
            Slots [T] int64 in this rank's pages, -1 for tokens that it does not keep; its numbers of keys
            [B] int32; and how many each token sees, its own included [T] int32, 0 of tokens of no request.
        """


KEY_SHARE: OptionalOp[KeyShareOp] = OptionalOp("key_share")
