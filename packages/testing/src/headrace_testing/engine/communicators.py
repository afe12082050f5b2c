"""Conformance suite of communicators, as far as one process can test: a suite to inherit.

Each test runs :meth:`CommunicatorConformance.on_every_rank`, which calls a function once per rank
and returns the results by rank; with several ranks they must run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace_core.parallel import Communicator, shard


class CommunicatorConformance:
    """Inherit and override :meth:`on_every_rank`."""

    def on_every_rank(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """Results of ``function(communicator)`` by rank."""
        raise NotImplementedError

    def test_ranks_count_from_zero(self) -> None:
        seen = self.on_every_rank(lambda group: (group.rank, group.world_size))
        assert seen == [(rank, len(seen)) for rank in range(len(seen))]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_all_reduce_sums(self, dtype: torch.dtype) -> None:
        def work(group: Communicator) -> torch.Tensor:
            return group.all_reduce(torch.full((2, 3), group.rank + 1.0, dtype=dtype))

        results = self.on_every_rank(work)
        total = sum(range(1, len(results) + 1))
        for result in results:
            assert result.dtype == dtype
            assert torch.equal(result, torch.full((2, 3), float(total), dtype=dtype))

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_all_gather_concatenates_in_rank_order(self, dim: int) -> None:
        def work(group: Communicator) -> torch.Tensor:
            return group.all_gather(torch.full((2, 3), float(group.rank)), dim=dim)

        results = self.on_every_rank(work)
        parts = [torch.full((2, 3), float(rank)) for rank in range(len(results))]
        for result in results:
            assert torch.equal(result, torch.cat(parts, dim=dim))

    def test_broadcast_gives_the_source_s_tensor(self) -> None:
        def work(group: Communicator) -> torch.Tensor:
            return group.broadcast(torch.tensor([group.rank]), source=group.world_size - 1)

        results = self.on_every_rank(work)
        assert all(torch.equal(result, torch.tensor([len(results) - 1])) for result in results)

    def test_barrier_and_close_return(self) -> None:
        def work(group: Communicator) -> bool:
            group.barrier()
            group.close()
            return True

        assert all(self.on_every_rank(work))

    def test_shard_divides_or_names_what_it_cannot_divide(self) -> None:
        sizes = self.on_every_rank(lambda group: shard(6 * group.world_size, group, what="heads"))
        assert sizes == [6] * len(sizes)
        if len(sizes) > 1:
            with pytest.raises(ValueError, match="heads"):
                self.on_every_rank(lambda group: shard(group.world_size + 1, group, what="heads"))
