"""The table of all-reduces: a name and a reason for every size, at every limit."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headrace_distributed.cuda import choice
from headrace_distributed.cuda.choice import (
    CUSTOM,
    KIB,
    LIMITS,
    MIB,
    NCCL,
    PYNCCL,
    SYMM_MEM,
    AllReduceNeed,
    Limits,
    by_size,
    choose,
    describe,
)  # fmt: skip

ALL = frozenset({CUSTOM, SYMM_MEM, PYNCCL})
HOPPER = AllReduceNeed(
    num_bytes=16, dtype="bfloat16", world_size=4, capability=(9, 0), available=ALL
)


@pytest.mark.parametrize(("world_size", "limit"), [(4, 512 * KIB), (6, 256 * KIB), (8, 256 * KIB)])
def test_one_shot_up_to_its_limit(world_size: int, limit: int) -> None:
    need = AllReduceNeed(
        num_bytes=0, dtype="float16", world_size=world_size, available=frozenset({CUSTOM, PYNCCL})
    )
    found = [choose(replace(need, num_bytes=size)).name for size in (limit - 16, limit, limit + 16)]
    assert found == ["custom one-shot", "custom one-shot", "custom two-shot"]
    last = choose(replace(need, num_bytes=8 * MIB + 16))
    assert last.name == "pynccl"
    assert last.passed_over["custom two-shot"] == "more than 8388608 bytes"


def test_two_ranks_take_one_shot_throughout() -> None:
    need = AllReduceNeed(
        num_bytes=8 * MIB, dtype="bfloat16", world_size=2, available=frozenset({CUSTOM, PYNCCL})
    )
    assert [choose(replace(need, num_bytes=size)).name for size in (16, 8 * MIB, 8 * MIB + 16)] == [
        "custom one-shot", "custom one-shot", "pynccl",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "name", "why"),
    [
        ({"world_size": 3}, "custom one-shot", "3 ranks: its kernels are for 2, 4, 6, 8"),
        ({"one_host": False}, "custom one-shot", "the ranks are on several hosts"),
        ({"fully_linked": False}, "custom two-shot", "NVLink does not join pairwise"),
        ({"dtype": "float64"}, "custom one-shot", "float64 is not added up"),
        ({"num_bytes": 24}, "custom one-shot", "no multiple of 16 bytes"),
        ({"available": frozenset({PYNCCL})}, "custom one-shot", "not set up"),
        ({"dtype": "float16", "num_bytes": 64 * MIB}, "symm_mem multimem", "set up for bfloat16"),
        ({"fixed_order": True, "num_bytes": 64 * MIB}, "symm_mem two-shot", "rounds partial sums"),
        ({"capability": (8, 0), "num_bytes": 9 * MIB}, "symm_mem two-shot",
         "capability 8.0 with 4 ranks is not in its table"),
        ({"num_bytes": 64 * MIB}, "symm_mem multimem", "more than 33554432 bytes"),
        ({"num_bytes": 2}, "symm_mem multimem", "no multiple of 4 bytes"),
    ],
)  # fmt: skip
def test_what_is_passed_over_says_why(changes: dict[str, object], name: str, why: str) -> None:
    found = choose(replace(HOPPER, **changes))  # type: ignore[arg-type]
    assert why in found.passed_over[name]
    assert name != found.name


def test_two_unlinked_ranks_may_map_memory() -> None:
    assert choose(replace(HOPPER, world_size=2, fully_linked=False)).name == "custom one-shot"


@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "symm_mem two-shot"), (6, "symm_mem multimem")]
)
def test_symmetric_memory_takes_what_is_too_large_for_custom(world_size: int, name: str) -> None:
    need = replace(HOPPER, world_size=world_size, available=ALL)
    limit = LIMITS.custom_beside_symm_mem[9, 0][world_size]
    assert choose(replace(need, num_bytes=limit)).name.startswith("custom")
    above = choose(replace(need, num_bytes=limit + 16))
    assert above.name == (name if limit < LIMITS.symm_mem[9, 0][world_size] else "pynccl")
    without = replace(need, available=frozenset({SYMM_MEM, PYNCCL}))
    assert choose(without).name == name
    switchless = choose(replace(without, world_size=6, multicast=False))
    assert switchless.name == "symm_mem two-shot"
    assert switchless.passed_over["symm_mem multimem"] == "the switch cannot add up"


def test_fixed_order_keeps_custom_sums_which_are_in_the_order_of_ranks() -> None:
    for size, name in ((16, "custom one-shot"), (8 * MIB, "custom two-shot"), (9 * MIB, "pynccl")):
        assert choose(replace(HOPPER, fixed_order=True, num_bytes=size)).name == name


@pytest.mark.parametrize("capturing", [False, True])
def test_torch_s_nccl_is_what_is_left(capturing: bool) -> None:
    found = choose(replace(HOPPER, available=frozenset({NCCL}), capturing=capturing))
    assert found.name == NCCL
    assert ("graph" in found.reason) is capturing


def test_every_size_of_every_group_has_a_name_and_a_reason() -> None:
    limits = sorted({
        LIMITS.custom, *LIMITS.one_shot.values(),
        *(x for table in (LIMITS.symm_mem, LIMITS.custom_beside_symm_mem)
          for sizes in table.values() for x in sizes.values()),
    })  # fmt: skip
    sizes = [0, 1, 2, *(limit + near for limit in limits for near in (-1, 0, 1))]
    parts = [frozenset(found) | {base} for count in range(3)
             for found in itertools.combinations((CUSTOM, SYMM_MEM), count)
             for base in (PYNCCL, NCCL)]  # fmt: skip
    names = {rule.name for rule in choice.RULES}
    for world_size, capability, available, dtype, linked, capturing in itertools.product(
        (1, 2, 3, 4, 6, 8, 16), ((8, 0), (9, 0), (10, 0)), parts, ("bfloat16", "float32", "int32"),
        (True, False), (True, False),
    ):  # fmt: skip
        need = AllReduceNeed(
            num_bytes=0, dtype=dtype, world_size=world_size, capability=capability,
            available=available, fully_linked=linked, capturing=capturing,
        )  # fmt: skip
        for size in sizes:
            found = choose(replace(need, num_bytes=size))
            assert found.name in names
            assert found.reason
            part = found.name.split()[0]
            assert part in available


def test_sizes_in_words() -> None:
    need = replace(HOPPER, available=frozenset({CUSTOM, PYNCCL}))
    assert describe(need) == (
        "custom one-shot up to 512 KiB (small: one meeting of the ranks, in the order of ranks), then "
        "custom two-shot up to 8 MiB (each rank adds up a part, in the order of ranks), then "
        "pynccl (NCCL on the current stream, which a graph can record)"
    )
    assert describe(replace(need, available=frozenset({NCCL}))) == (
        "nccl (torch's NCCL, as nothing else serves)"
    )


def test_sizes_ascend_and_end_without_one() -> None:
    for world_size in (2, 4, 6, 8):
        ends = [end for end, _ in by_size(replace(HOPPER, world_size=world_size))]
        assert ends[-1] is None
        assert ends[:-1] == sorted(set(ends[:-1]))  # type: ignore[type-var]


def test_a_platform_has_limits_of_its_own() -> None:
    own = Limits(one_shot={4: 32}, custom=64)
    need = replace(HOPPER, available=frozenset({CUSTOM, NCCL}))
    found = [choose(replace(need, num_bytes=size), own).name for size in (32, 48, 64, 80)]
    assert found == ["custom one-shot", "custom two-shot", "custom two-shot", "nccl"]
