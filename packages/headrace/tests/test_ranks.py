from __future__ import annotations

import pytest

from headrace.assembly.ranks import Ranks
from headrace_core.errors import ConfigError
from headrace_engine.cores import CpuThreads
from headrace_engine.multiproc.places import RankPlace


def test_ranks_share_threads_and_cores_in_order() -> None:
    whole = CpuThreads(5, (8, 9, 10, 11, 12))
    shares = [Ranks(RankPlace(rank, 2)).threads(whole) for rank in range(2)]
    assert shares == [CpuThreads(2, (8, 9)), CpuThreads(2, (10, 11))]


@pytest.mark.parametrize("rank", [0, 2])
def test_fewer_cores_than_ranks_are_refused(rank: int) -> None:
    """A rank without a core would not be bound at all."""
    with pytest.raises(ConfigError, match=r"cpu_bind: it binds 2 .*tensor_parallel_size = 3"):
        Ranks(RankPlace(rank, 3)).threads(CpuThreads(2, (0, 1)))


def test_fewer_threads_than_ranks_need_no_cores() -> None:
    assert Ranks(RankPlace(2, 3)).threads(CpuThreads(1)) == CpuThreads(1)
