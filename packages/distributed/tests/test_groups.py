"""Groups of ranks: examples, and what holds for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import ConfigError
from headrace_distributed.groups import Group, ParallelSizes, groups_of, parallel_groups


@st.composite
def sizes(draw: st.DrawFn) -> ParallelSizes:
    tensor = draw(st.integers(1, 6))
    divisors = [n for n in range(1, tensor + 1) if tensor % n == 0]
    return ParallelSizes(
        tensor=tensor,
        pipeline=draw(st.integers(1, 4)),
        data=draw(st.integers(1, 4)),
        prefill_context=draw(st.integers(1, 3)),
        decode_context=draw(st.sampled_from(divisors)),
    )


def ranks(found: tuple[Group, ...]) -> list[list[int]]:
    return [list(group.ranks) for group in found]


def test_two_by_four() -> None:
    found = parallel_groups(ParallelSizes(tensor=2, pipeline=4))
    assert ranks(found["tp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert ranks(found["pp"]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert ranks(found["ep"]) == ranks(found["tp"])
    assert ranks(found["world"]) == [list(range(8))]
    assert [group.name for group in found["pp"]] == ["pp:0", "pp:1"]


def test_every_axis() -> None:
    found = parallel_groups(ParallelSizes(2, 2, 2, 2, decode_context=2))
    assert ranks(found["tp"])[:2] == [[0, 1], [2, 3]]
    assert ranks(found["dcp"]) == ranks(found["tp"])
    assert ranks(found["pcp"])[:2] == [[0, 2], [1, 3]]
    assert ranks(found["pp"])[:2] == [[0, 4], [1, 5]]
    assert ranks(found["dp"])[:2] == [[0, 8], [1, 9]]
    assert ranks(found["ep"]) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]


def test_decode_context_divides_tensor_groups() -> None:
    found = parallel_groups(ParallelSizes(tensor=4, data=2, decode_context=2))
    assert ranks(found["dcp"]) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@given(sizes())
def test_each_rank_is_in_one_group_of_each_kind(sizes: ParallelSizes) -> None:
    counts = {
        "world": sizes.world_size, "tp": sizes.tensor, "dcp": sizes.decode_context,
        "pcp": sizes.prefill_context, "pp": sizes.pipeline, "dp": sizes.data,
        "ep": sizes.data * sizes.prefill_context * sizes.tensor,
    }  # fmt: skip
    found = parallel_groups(sizes)
    assert found.keys() == counts.keys()
    for prefix, groups in found.items():
        assert sorted(rank for group in groups for rank in group.ranks) == [
            *range(sizes.world_size)
        ]
        assert {group.world_size for group in groups} == {counts[prefix]}
        assert all(list(group.ranks) == sorted(group.ranks) for group in groups)


@given(sizes(), st.data())
def test_axes_meet_in_one_rank(sizes: ParallelSizes, data: st.DataObject) -> None:
    """Two groups of a rank, along different axes, have no other rank in common."""
    rank = data.draw(st.integers(0, sizes.world_size - 1))
    own = groups_of(rank, sizes)
    for one, other in (("tp", "pp"), ("tp", "dp"), ("pp", "dp"), ("pcp", "tp"), ("ep", "pp")):
        assert set(own[one].ranks) & set(own[other].ranks) == {rank}
    assert set(own["tp"].ranks) <= set(own["ep"].ranks)


def test_neighbours_wrap_around() -> None:
    group = Group("pp:1", (1, 3, 5))
    assert [group.next_rank(rank) for rank in group.ranks] == [3, 5, 1]
    assert [group.previous_rank(rank) for rank in group.ranks] == [5, 1, 3]
    assert group.rank_of(5) == 2
    with pytest.raises(ValueError, match=r"rank 2 is not in group 'pp:1' of \[1, 3, 5\]"):
        group.rank_of(2)


def test_sizes_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 0 must be 1 or more"):
        ParallelSizes(pipeline=0)
    with pytest.raises(ConfigError, match="decode_context_parallel_size = 2 must divide"):
        ParallelSizes(tensor=3, decode_context=2)
    with pytest.raises(ValueError, match="rank 2 must be within 0 and 1"):
        groups_of(2, ParallelSizes(tensor=2))
