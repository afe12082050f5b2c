"""Conformance suites of communicators, to inherit.

Each test calls :meth:`CommunicatorConformance.on_every_rank`, which calls a function ``(communicator,
...)`` once per rank, at the same time, and returns the results by rank. The functions are of this module,
so that they can be sent to other processes
(:class:`~headrace_testing.engine.rank_processes.RankProcesses`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.parallel import Communicator
from headrace_testing.engine.rank_processes import RankFailed, RankProcesses

SIZES = (0, 1, 7, 4096 + 3)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MOVED = (*FLOATS, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn)
"""Types of tensors that are moved and not added up."""


def home(group: Communicator) -> torch.device:
    """Where a communicator's tensors lie: its ``device``, or the CPU."""
    found: torch.device = getattr(group, "device", torch.device("cpu"))
    return found


def own(
    group: Communicator, shape: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """What :func:`made` gives this rank, where the communicator's tensors lie."""
    return made(group.rank, shape, dtype, seed).to(home(group))


def made(rank: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's tensor: numbers of many magnitudes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randn(*shape, generator=generator)
    numbers *= torch.exp2(torch.randint(-6, 7, tuple(shape), generator=generator).float())
    if dtype.is_floating_point:
        return numbers.to(dtype)
    return (numbers > 0) if dtype == torch.bool else (numbers * 10).to(torch.int64).to(dtype)


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, in float32, rounded once; integers as they are."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.is_floating_point else dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = result + part.to(wide)
    return result.to(dtype)


def assert_sum(
    result: torch.Tensor,
    expected: torch.Tensor,
    parts: Sequence[torch.Tensor],
    *,
    fixed_order: bool,
) -> None:
    """Check a sum of ``parts``: the same bits in the order of ranks, else what rounding allows."""
    if fixed_order or not expected.is_floating_point():
        assert same_bits(result, expected)
        return
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    size = sum(part.double().abs() for part in parts)
    away = (result.double() - expected.double()).abs()
    assert bool((away <= len(parts) * torch.finfo(result.dtype).eps * size).all())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True for tensors of equal shape, dtype and bytes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    views = [x.contiguous().view(-1).view(torch.uint8) for x in (one, other)]
    return torch.equal(*views)


def place(group: Communicator) -> tuple[int, int]:
    return group.rank, group.world_size


def reduced(
    group: Communicator, shape: Sequence[int], dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    return group.all_reduce(own(group, shape, dtype, seed)).cpu()


def reduced_transposed(group: Communicator) -> torch.Tensor:
    return group.all_reduce(own(group, (5, 3), torch.float32).T).cpu()


def scattered(
    group: Communicator, shape: Sequence[int], dtype: torch.dtype, dim: int
) -> torch.Tensor:
    return group.reduce_scatter(own(group, shape, dtype), dim).cpu()


def gathered(
    group: Communicator, shape: Sequence[int], dtype: torch.dtype, dim: int
) -> torch.Tensor:
    return group.all_gather(own(group, shape, dtype), dim).cpu()


def told(
    group: Communicator, shape: Sequence[int], dtype: torch.dtype, source: int
) -> torch.Tensor:
    return group.broadcast(own(group, shape, dtype), source).cpu()


def met(group: Communicator) -> tuple[int, int]:
    before = time.monotonic_ns()
    group.barrier()
    return before, time.monotonic_ns()


def sequence(group: Communicator, count: int) -> list[torch.Tensor]:
    """Operations one after the other, with a rank late now and then."""
    results = []
    for step in range(count):
        if step % group.world_size == group.rank:
            torch.randn(150, 150) @ torch.randn(150, 150)
        size = (1, 700, 3, 40_000)[step % 4]
        tensor = own(group, (size,), torch.float32, seed=step)
        if step % 3 == 0:
            results.append(group.all_reduce(tensor))
        elif step % 3 == 1:
            results.append(group.all_gather(tensor, 0))
        else:
            results.append(group.broadcast(tensor, step % group.world_size))
    return [result.cpu() for result in results]


def expected_of_sequence(world_size: int, count: int) -> list[torch.Tensor]:
    """What :func:`sequence` returns."""
    results = []
    for step in range(count):
        size = (1, 700, 3, 40_000)[step % 4]
        parts = [made(rank, (size,), torch.float32, step) for rank in range(world_size)]
        ways = (total(parts), torch.cat(parts), parts[step % world_size])
        results.append(ways[step % 3])
    return results


def left(group: Communicator) -> None:
    group.close()


class CommunicatorConformance:
    """Inherit and override :meth:`on_every_rank`."""

    fixed_order: ClassVar[bool] = True
    """False: sums are taken in an order of the library's own, with partial sums in the tensors' dtype.
    All ranks hold the same bits nevertheless."""

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Results of ``function(communicator, *arguments)`` by rank."""
        raise NotImplementedError

    def check_sums(
        self, results: Sequence[torch.Tensor], expected: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> None:
        """Check what all ranks hold of the sum of ``parts``."""
        assert all(same_bits(result, results[0]) for result in results)
        assert_sum(results[0], expected, parts, fixed_order=self.fixed_order)

    def world_size(self) -> int:
        return len(self.on_every_rank(place))

    def parts(self, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
        """What :func:`made` gives each rank."""
        return [made(rank, shape, dtype, seed) for rank in range(self.world_size())]

    def test_ranks_count_from_zero(self) -> None:
        seen = self.on_every_rank(place)
        assert seen == [(rank, len(seen)) for rank in range(len(seen))]

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
    def test_all_reduce_adds_in_the_order_of_ranks(self, dtype: torch.dtype, size: int) -> None:
        results = self.on_every_rank(reduced, (size,), dtype)
        parts = self.parts((size,), dtype)
        self.check_sums(results, total(parts), parts)

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_all_reduce_of_a_large_tensor(self, dtype: torch.dtype) -> None:
        results = self.on_every_rank(reduced, (700_001,), dtype)
        parts = self.parts((700_001,), dtype)
        self.check_sums(results, total(parts), parts)

    def test_all_reduce_keeps_the_shape_of_what_is_not_contiguous(self) -> None:
        parts = [part.T for part in self.parts((5, 3), torch.float32)]
        self.check_sums(self.on_every_rank(reduced_transposed), total(parts), parts)

    def test_all_reduce_gives_the_same_bits_again(self) -> None:
        once, again = (self.on_every_rank(reduced, (90_001,), torch.bfloat16) for _ in range(2))
        assert all(map(same_bits, once, again))

    def test_a_row_s_sum_does_not_depend_on_the_rows_beside_it(self) -> None:
        if not self.fixed_order:
            pytest.skip("sums are taken in an order of the library's own")
        rows = self.on_every_rank(reduced, (1, 1024), torch.bfloat16)[0]
        parts = self.parts((1, 1024), torch.bfloat16)
        for count in (2, 65, 300):
            [many] = {
                bytes(result[0].view(torch.uint8).numpy())
                for result in self.on_every_rank(reduced_repeated, count)
            }
            assert many == bytes(rows.view(torch.uint8).numpy())
        assert same_bits(rows, total(parts))

    @pytest.mark.parametrize("shape", [(12, 12, 12), (1, 12, 0), (12, 1, 24)], ids=str)
    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    def test_reduce_scatter_gives_each_rank_its_part(self, shape: Sequence[int], dim: int) -> None:
        world_size = self.world_size()
        if shape[dim] % world_size:
            if world_size > 1:
                with pytest.raises((ValueError, RankFailed), match="do not divide"):
                    self.on_every_rank(scattered, shape, torch.bfloat16, dim)
            return
        results = self.on_every_rank(scattered, shape, torch.bfloat16, dim)
        self._check_scattered(results, self.parts(shape, torch.bfloat16), dim)

    def test_reduce_scatter_of_a_large_tensor(self) -> None:
        world_size = self.world_size()
        shape = (100_003, world_size)
        results = self.on_every_rank(scattered, shape, torch.float32, 1)
        self._check_scattered(results, self.parts(shape, torch.float32), 1)

    def _check_scattered(
        self, results: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], dim: int
    ) -> None:
        world_size = len(results)
        wholes = total(parts).chunk(world_size, dim)
        for rank, result in enumerate(results):
            own_parts = [part.chunk(world_size, dim)[rank] for part in parts]
            assert_sum(result, wholes[rank], own_parts, fixed_order=self.fixed_order)

    @pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (3, 0, 2)], ids=str)
    @pytest.mark.parametrize("dim", [0, 1, 2, -1])
    def test_all_gather_concatenates_in_rank_order(self, shape: Sequence[int], dim: int) -> None:
        results = self.on_every_rank(gathered, shape, torch.float32, dim)
        expected = torch.cat(self.parts(shape, torch.float32), dim)
        assert all(same_bits(result, expected) for result in results)

    @pytest.mark.parametrize("dtype", MOVED, ids=str)
    def test_all_gather_moves_every_type(self, dtype: torch.dtype) -> None:
        parts = self.parts((3, 7), dtype)
        expected = torch.cat([part.view(torch.uint8) for part in parts], -1).view(dtype)
        for result in self.on_every_rank(gathered, (3, 7), dtype, -1):
            assert same_bits(result, expected)

    @pytest.mark.parametrize("dim", [0, 1])
    def test_all_gather_of_a_large_tensor(self, dim: int) -> None:
        results = self.on_every_rank(gathered, (301, 1001), torch.float32, dim)
        expected = torch.cat(self.parts((301, 1001), torch.float32), dim)
        assert all(same_bits(result, expected) for result in results)

    def test_a_dimension_that_is_none_is_refused_by_name(self) -> None:
        if self.world_size() > 1:
            with pytest.raises((ValueError, RankFailed), match=r"dim = 3 .* \[2, 3, 5\]"):
                self.on_every_rank(gathered, (2, 3, 5), torch.float32, 3)

    @pytest.mark.parametrize("dtype", MOVED, ids=str)
    def test_broadcast_gives_the_source_s_tensor(self, dtype: torch.dtype) -> None:
        for source, expected in enumerate(self.parts((3, 5), dtype)):
            results = self.on_every_rank(told, (3, 5), dtype, source)
            assert all(same_bits(result, expected) for result in results)

    @pytest.mark.parametrize("size", [*SIZES, 700_001])
    def test_broadcast_of_every_size(self, size: int) -> None:
        results = self.on_every_rank(told, (size,), torch.float32, 0)
        expected = made(0, (size,), torch.float32)
        assert all(same_bits(result, expected) for result in results)

    def test_a_source_that_is_none_is_refused_by_name(self) -> None:
        size = self.world_size()
        if size > 1:
            with pytest.raises((ValueError, RankFailed), match=f"source = {size}"):
                self.on_every_rank(told, (3,), torch.float32, size)

    def test_barrier_returns_when_all_have_called(self) -> None:
        for _ in range(10):
            times = self.on_every_rank(met)
            assert max(before for before, _ in times) <= min(after for _, after in times)

    def test_operations_follow_each_other(self) -> None:
        expected = expected_of_sequence(self.world_size(), 120)
        for results in self.on_every_rank(sequence, 120):
            for step, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                if step % 3 or self.fixed_order:
                    assert same_bits(result, wanted)
                else:
                    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-3)


def reduced_repeated(group: Communicator, count: int) -> torch.Tensor:
    """The first row is that of :func:`reduced` for a single row, others follow."""
    row = own(group, (1, 1024), torch.bfloat16)
    others = own(group, (count - 1, 1024), torch.bfloat16, seed=count)
    return group.all_reduce(torch.cat([row, others])).cpu()


class LostPeerConformance:
    """A rank that is gone is known by its number, and nobody waits for it. Inherit and override
    :meth:`ranks`.

    The communicator's own timeout is longer than a test waits, so it is not what ends the waiting.
    """

    def ranks(self, world_size: int) -> RankProcesses:
        """New processes, which the test ends."""
        raise NotImplementedError

    @pytest.mark.parametrize("size", [1, 700_001])
    def test_a_killed_rank_is_named(self, size: int) -> None:
        with self.ranks(3) as ranks:
            for rank in (0, 2):
                ranks.begin(rank, reduced, (size,), torch.float32)
            ranks.kill(1)
            for rank in (0, 2):
                failure = ranks.outcome(rank)
                assert isinstance(failure, RankFailed)
                assert (failure.kind, failure.rank) == ("PeerLost", 1)
                assert "rank 1" in failure.message

    def test_a_rank_that_was_killed_before_is_named(self) -> None:
        with self.ranks(2) as ranks:
            ranks.kill(0)
            for function, arguments in ((met, ()), (reduced, ((7,), torch.float32))):
                ranks.begin(1, function, *arguments)
                failure = ranks.outcome(1)
                assert isinstance(failure, RankFailed), failure
            assert "rank 0" in failure.message or "left" in failure.message

    def test_a_rank_that_left_is_missed(self) -> None:
        with self.ranks(2) as ranks:
            ranks.begin(0, left)
            ranks.answer(0)
            ranks.begin(1, met)
            failure = ranks.outcome(1)
            assert isinstance(failure, RankFailed)
            assert failure.kind == "PeerLost"
