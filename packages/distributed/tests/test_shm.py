"""Shared memory: the suite over three processes and two threads, pieces of every size, lost ranks, errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core import plugins
from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.parallel import Communicator
from headrace_distributed.errors import CallMismatch, GroupError, PeerTimeout
from headrace_distributed.peers import Peer
from headrace_distributed.rendezvous import RendezvousServer
from headrace_distributed.shm import communicator, library
from headrace_distributed.shm.communicator import create, one_round_bytes
from headrace_distributed.shm.segment import (
    create_segment,
    handle_of,
    open_segment,
    parse_handle,
)  # fmt: skip
from headrace_testing.engine.communicators import (
    CommunicatorConformance,
    LostPeerConformance,
    made,
    reduced,
    same_bits,
    total,
)  # fmt: skip
from headrace_testing.engine.rank_processes import RankProcesses

pytestmark = pytest.mark.skipif(
    not library.available(), reason="the native library was not built: no C++ compiler, or no Linux"
)
SLOT = 64 << 10


def groups(world_size: int, **settings: Any) -> list[Communicator]:
    """A group whose ranks are threads of this process while it forms."""
    with RendezvousServer() as server, ThreadPoolExecutor(world_size) as pool:
        address = server.address("tp")
        return list(
            pool.map(lambda rank: create(rank, world_size, address, **settings), range(world_size))
        )


def together(found: list[Communicator], *calls: Callable[[Communicator], Any]) -> list[Any]:
    """What each rank's call returned or raised; one call is every rank's."""
    with ThreadPoolExecutor(len(found)) as pool:
        each = calls * len(found) if len(calls) == 1 else calls
        futures = [pool.submit(call, group) for call, group in zip(each, found, strict=True)]
        return [future.exception() or future.result() for future in futures]


class TestProcesses(CommunicatorConformance):
    ranks: ClassVar[RankProcesses]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def processes(cls) -> Iterator[None]:
        with RendezvousServer() as server, RankProcesses("shm", 3, server.address("tp")) as ranks:
            cls.ranks = ranks
            yield

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.ranks.on_every_rank(function, *arguments)


class TestThreads(CommunicatorConformance):
    """Two ranks and the smallest slots: every large tensor goes through in many pieces."""

    found: ClassVar[list[Communicator]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads(cls) -> Iterator[None]:
        cls.found = groups(2, slot_bytes=SLOT)
        yield
        for group in cls.found:
            group.close()

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        results = together(self.found, lambda group: function(group, *arguments))
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


class TestLostPeer(LostPeerConformance):
    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with RendezvousServer() as server:
            self.address = server.address("tp")
            yield

    def ranks(self, world_size: int) -> RankProcesses:
        return RankProcesses("shm", world_size, self.address)

    def test_a_killed_group_leaves_nothing_behind(self) -> None:
        before = set(os.listdir("/dev/shm"))
        with self.ranks(2) as ranks:
            pids = [process.pid for process in ranks.processes]
            maps = Path(f"/proc/{pids[0]}/maps").read_text(encoding="utf-8")
            assert "memfd:headrace-group (deleted)" in maps
            for descriptor in Path(f"/proc/{pids[0]}/fd").iterdir():
                assert "headrace-group" not in os.readlink(descriptor)
            for rank in range(2):
                ranks.kill(rank)
        left = set(os.listdir("/dev/shm")) - before
        assert not {name for name in left if "headrace" in name}


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.one_of(
            st.integers(0, 80),
            st.sampled_from([n + d for n in (8192, 16384, 32768, 65536) for d in (-33, -1, 0, 1)]),
        ),
        min_size=1,
        max_size=4,
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int32]),
    world_size=st.sampled_from([2, 3, 5]),
)
def test_sums_of_every_size(
    sizes: list[int],
    dtype: torch.dtype,
    world_size: int,
    small_groups: dict[int, list[Communicator]],
) -> None:
    for seed, size in enumerate(sizes):
        parts = [made(rank, (size,), dtype, seed) for rank in range(world_size)]
        expected = parts[0].clone() if dtype == torch.float64 else total(parts)
        if dtype == torch.float64:
            for part in parts[1:]:
                expected += part

        def work(group: Communicator, size: int = size, seed: int = seed) -> torch.Tensor:
            return reduced(group, (size,), dtype, seed)

        for result in together(small_groups[world_size], work):
            assert same_bits(result, expected)


@pytest.fixture(scope="module")
def small_groups() -> Iterator[dict[int, list[Communicator]]]:
    found = {size: groups(size, slot_bytes=SLOT) for size in (2, 3, 5)}
    yield found
    for group in found.values():
        for rank in group:
            rank.close()


SPECIAL = (
    0.0,
    -0.0,
    1.0,
    float("inf"),
    float("-inf"),
    float("nan"),
    65504.0,
    2**-24,
    2**-25,
    1e-40,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_number_of_16_bits_and_special_ones(dtype: torch.dtype) -> None:
    """Widening and rounding are those of torch, for every pattern of bits but those of NaN."""
    if dtype == torch.float32:
        ones = torch.tensor(SPECIAL)
    else:
        ones = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    found = groups(2)
    for value in SPECIAL:
        others = torch.full_like(ones, value)
        expected = total([ones, others])
        inputs = (ones.clone(), others)
        for result in together(found, lambda g, i=inputs: g.all_reduce(i[g.rank].clone())):
            assert torch.equal(result.isnan(), expected.isnan())
            number = ~expected.isnan()
            assert same_bits(result[number], expected[number])


def test_operations_that_differ_are_told() -> None:
    first, second = together(
        groups(2),
        lambda group: group.all_reduce(torch.ones(3)),
        lambda group: group.barrier(),
    )
    assert isinstance(first, CallMismatch)
    assert str(first) == (
        "ranks disagree: rank 0 called all_reduce of 12 bytes, float32, rank 1 called barrier"
    )
    assert isinstance(second, CallMismatch)


def test_sizes_that_differ_are_told() -> None:
    found = groups(2)
    first, _ = together(found, lambda group: group.broadcast(torch.ones(3 + group.rank)))
    assert isinstance(first, CallMismatch)
    assert "broadcast of 12 bytes from rank 0, rank 1 called broadcast of 16 bytes" in str(first)
    with pytest.raises(CallMismatch, match="ranks disagree: rank 0 called broadcast of 12 bytes"):
        found[0].barrier()


def test_a_rank_that_is_late_is_named() -> None:
    found = groups(2, timeout=2.0)
    with pytest.raises(PeerTimeout, match=r"all_reduce: rank 1 did not come within 2 s") as caught:
        found[0].all_reduce(torch.ones(3))
    assert caught.value.rank == 1
    late = together(found[1:], lambda group: [group.all_reduce(torch.ones(3)), group.barrier()])
    assert "barrier: rank 0 gave up after an error" in str(late[0])


def test_a_rank_that_does_not_come_is_named() -> None:
    with (
        RendezvousServer() as server,
        pytest.raises(PeerTimeout, match=r"rank 1 of 2 has not joined the group within 1 s"),
    ):
        create(0, 2, server.address("tp"), timeout=1)


def test_two_processes_are_not_one_rank() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(3) as pool:
        address = server.address("tp")
        joined = [pool.submit(create, rank, 2, address, timeout=5) for rank in (1, 1, 0)]
        failed = [found.exception() for found in joined]
    assert failed[2] is None
    [error] = [each for each in failed if each is not None]
    # If the group was complete before the second came, its maker has closed the memory's descriptor.
    opened = "rank 1 was opened before: each is one process's"
    closed = "does not hold this shared memory any more"
    assert str(error) == opened or closed in str(error)


def test_a_group_that_was_left_says_so() -> None:
    [group] = groups(1)
    group.close()
    group.close()
    for call in (group.barrier, lambda: group.all_reduce(torch.ones(1))):
        with pytest.raises(GroupError, match="rank 0 has left the group"):
            call()


def test_a_group_of_one_adds_nothing() -> None:
    [group] = groups(1)
    tensor = torch.randn(100_003)
    assert torch.equal(group.all_reduce(tensor.clone()), tensor)


def test_ranks_of_two_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "introduce", lambda *_: (Peer("one", 1), Peer("other", 1)))
    with (
        RendezvousServer() as server,
        pytest.raises(ConfigError, match=r"needs all ranks on one host.*'gloo'"),
    ):
        create(0, 2, server.address("tp"))


def test_types_that_cannot_be_added_are_refused() -> None:
    [group] = groups(1)
    with pytest.raises(ValueError, match="all_reduce: tensors of bool cannot be added up"):
        group.all_reduce(torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"world_size": 65}, "takes up to 64 ranks, got 65"),
        ({"slot_bytes": 1000}, "slot_bytes = 1000 must be a multiple of 65536"),
        ({"slot_bytes": 0}, "slot_bytes = 0 must be a multiple"),
    ],
)
def test_settings_are_checked(settings: dict[str, int], message: str) -> None:
    given_settings = {"world_size": 2, **settings}
    with pytest.raises(ConfigError, match=message):
        create(0, rendezvous="tcp://127.0.0.1:1/tp", **given_settings)


def test_a_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "path", lambda: tmp_path / "headrace_shm.so")
    library.load.cache_clear()
    with pytest.raises(MissingDependency, match=r"cmake -S .*native"):
        create(0, 1, "tcp://127.0.0.1:1/tp")


def test_the_entry_point() -> None:
    assert plugins.load("headrace.communicators", "shm") is create


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
def test_one_round_is_for_less_with_more_ranks(world_size: int) -> None:
    assert one_round_bytes(world_size) >= one_round_bytes(world_size + 1) > 0


class TestSegment:
    def test_others_see_what_is_written(self) -> None:
        descriptor = create_segment("test", 8192)
        other = open_segment(parse_handle(str(handle_of(descriptor))), 8192)
        os.pwrite(descriptor, b"hello", 4096)
        assert os.pread(other, 5, 4096) == b"hello"
        with pytest.raises(PermissionError):
            os.ftruncate(other, 100)
        os.close(descriptor)
        os.close(other)

    def test_a_segment_that_is_gone_is_refused(self) -> None:
        descriptor = create_segment("test", 4096)
        handle = handle_of(descriptor)
        with pytest.raises(GroupError, match="does not hold this shared memory any more"):
            open_segment(handle, 8192)
        os.close(descriptor)
        with pytest.raises(GroupError, match="does not hold this shared memory any more"):
            open_segment(handle, 4096)

    @pytest.mark.parametrize("text", ["", "1:2", "1:2:x", "../:1:2", "1:2:3:4"])
    def test_a_handle_that_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="PID:DESCRIPTOR:INODE"):
            parse_handle(text)
