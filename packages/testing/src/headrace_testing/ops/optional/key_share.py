"""``key_share``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_testing.ops.suite import OpSuite


class KeyShareConformance(OpSuite):
    """One rank's slots, keys, and keys that each token sees."""

    @pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 2)])
    def test_key_share(
        self, op: Callable[[str], Any], dtype: str, ranks: int, interleave: int
    ) -> None:
        """Token by token, in blocks of 8 tokens of each rank: chunks, single tokens, requests of nothing new,
        tokens of no request."""
        mine, block = op("key_share"), 8 * ranks
        requests = [(0, 3 * block), (block - 1, block), (5, 5), (7, 2 * block + 3), (0, 1)]
        new = [end - first for first, end in requests]
        positions = [(b, i) for b, (first, end) in enumerate(requests) for i in range(first, end)]
        slots = [(10 + 5 * b + i // block) * block + i % block for b, i in positions]
        padding = 3
        arguments = (
            self._ints([0, *torch.tensor(new).cumsum(0).tolist()]),
            self._ints([end for _, end in requests]),
            self._ints([*slots, -1, -7, 4], torch.int64),
        )
        sizes = {"ranks": ranks, "interleave": interleave}
        for rank in range(ranks):
            own, lens, counts = mine(*arguments, rank=rank, **sizes)
            assert (own.dtype, lens.dtype, counts.dtype) == (
                torch.int64, torch.int32, torch.int32,
            )  # fmt: skip
            kept = [[i for i in range(end) if i // interleave % ranks == rank]
                    for _, end in requests]  # fmt: skip
            assert lens.tolist() == list(map(len, kept))
            seen = [sum(other <= i for other in kept[b]) for b, i in positions]
            assert counts.tolist() == [*seen, *[0] * padding]
            expected = [
                (10 + 5 * b + i // block) * 8 + kept[b].index(i) % 8 if i in kept[b] else -1
                for b, i in positions
            ]
            assert own[:-padding].tolist() == expected
            assert own[-padding : -padding + 2].tolist() == [-1, -1]

    def test_key_share_of_an_empty_step(self, op: Callable[[str], Any], dtype: str) -> None:
        nothing = self._ints([], torch.int64)
        own, lens, counts = op("key_share")(
            self._ints([0]), self._ints([]), nothing, rank=1, ranks=2, interleave=1
        )
        assert own.shape == lens.shape == counts.shape == (0,)

    def _ints(self, numbers: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)
