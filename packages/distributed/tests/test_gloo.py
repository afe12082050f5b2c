"""gloo: the suite over three processes and over four threads, lost ranks, and addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_distributed.errors import GroupError, PeerTimeout
from headrace_distributed.gloo import create
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import CommunicatorConformance, LostPeerConformance
from headrace_testing.engine.rank_processes import RankProcesses


class TestProcesses(CommunicatorConformance):
    ranks: ClassVar[RankProcesses]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def processes(cls) -> Iterator[None]:
        with RendezvousServer() as server, RankProcesses("gloo", 3, server.address("tp")) as ranks:
            cls.ranks = ranks
            yield

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.ranks.on_every_rank(function, *arguments)


class TestThreads(CommunicatorConformance):
    """Groups of one process: nothing of them is global."""

    groups: ClassVar[list[Communicator]]
    pool: ClassVar[ThreadPoolExecutor]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads(cls) -> Iterator[None]:
        with RendezvousServer() as server, ThreadPoolExecutor(4) as pool:
            make = plugins.load("headrace.communicators", "gloo")
            address = server.address("tp")
            groups = list(pool.map(lambda rank: make(rank, 4, address), range(4)))
            cls.groups, cls.pool = groups, pool
            yield
            for group in groups:
                group.close()
        assert not torch.distributed.is_initialized()

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self.pool.map(lambda group: function(group, *arguments), self.groups))


class TestLostPeer(LostPeerConformance):
    @pytest.fixture(autouse=True)
    def server(self) -> Iterator[None]:
        with RendezvousServer() as server:
            self.address = server.address("tp")
            yield

    def ranks(self, world_size: int) -> RankProcesses:
        return RankProcesses("gloo", world_size, self.address)


def test_groups_overlap() -> None:
    """A and B are a group, then B and C: torch's global groups cannot do that."""
    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        for name, values in (("ab", (1.0, 2.0)), ("bc", (2.0, 4.0))):
            address = server.address(name)
            groups = list(pool.map(create, (0, 1), (2, 2), (address, address)))
            tensors = [torch.tensor([value]) for value in values]
            sums = list(pool.map(lambda g, t: g.all_reduce(t).item(), groups, tensors))
            assert sums == [sum(values)] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    with (
        RendezvousServer() as server,
        pytest.raises(PeerTimeout, match=r"rank 1 of 2 .* within 1 s") as caught,
    ):
        create(0, 2, server.address("tp"), timeout=1)
    assert caught.value.rank == 1


def test_a_rank_that_comes_too_late_is_missed() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        address = server.address("tp")
        joined = [pool.submit(create, rank, 2, address, timeout=2.0) for rank in range(2)]
        groups = [group.result() for group in joined]
        with pytest.raises(GroupError, match="barrier: a rank did not come within 2 s"):
            groups[0].barrier()
        with pytest.raises(GroupError, match="barrier"):
            groups[1].barrier()


def test_a_group_that_was_left_says_so() -> None:
    with RendezvousServer() as server:
        group = create(0, 1, server.address("tp"))
        group.close()
        with pytest.raises(GroupError, match="all_reduce: rank 0 has left the group"):
            group.all_reduce(torch.ones(3))


@pytest.mark.parametrize(
    "address",
    ["", "tp", "tcp://127.0.0.1/tp", "tcp://127.0.0.1:77", "tcp://h:x/tp", "http://h:1/tp"],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"must be tcp://HOST:PORT/NAME"):
        create(0, 2, address)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_that_is_none_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank = {rank} must be within"):
        create(rank, world_size, "tcp://127.0.0.1:77/tp")


def test_a_tensor_elsewhere_is_refused() -> None:
    with RendezvousServer() as server:
        group = create(0, 1, server.address("tp"))
        with pytest.raises(ValueError, match="all_reduce: the tensor is on meta"):
            group.all_reduce(torch.ones(3, device="meta"))
        group.close()
