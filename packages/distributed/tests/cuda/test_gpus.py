"""What only several GPUs can show. Never run so far: none were at hand when this was written.

Covered elsewhere without them: the communicators' code over stand-ins for NCCL, CUDA's run time and torch's
symmetric memory, and the kernels in Triton's interpreter. Not covered: those libraries themselves, the
kernels' memory order on several GPUs, speed, and the sizes in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.parallel import Communicator
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import CommunicatorConformance, made, same_bits, total
from headrace_testing.engine.rank_processes import RankProcesses, from_file

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: ranks have one each"
)


def join(
    rank: int, world_size: int, rendezvous: str, *, name: str, fixed_order: bool
) -> Communicator:
    from headrace_core import plugins

    torch.cuda.set_device(rank)
    create = plugins.load("headrace.communicators", name)
    made_here: Communicator = create(rank, world_size, rendezvous, fixed_order=fixed_order)
    return made_here


def recorded(group: Communicator, size: int) -> list[torch.Tensor]:
    """Sums of a graph that is replayed with other inputs, between sums that are not recorded."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.zeros(size, dtype=torch.bfloat16, device=device)
    group.all_reduce(held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = group.all_reduce(held.clone())
    found = []
    for step in range(6):
        held.copy_(made(group.rank, (size,), torch.bfloat16, step))
        graph.replay()
        found.append(result.cpu())
        found.append(group.all_reduce(held.clone()).cpu())
    return found


class Gpus(CommunicatorConformance):
    """Two processes with a GPU each."""

    name: ClassVar[str]
    ranks: ClassVar[RankProcesses]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def processes(cls) -> Iterator[None]:
        make = partial(from_file, __file__, "join", name=cls.name, fixed_order=cls.fixed_order)
        with RendezvousServer() as server, RankProcesses(make, 2, server.address("tp")) as ranks:
            cls.ranks = ranks
            yield

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.ranks.on_every_rank(function, *arguments)

    @pytest.mark.parametrize("size", [4096, 700_000, 5_000_000])
    def test_recorded_sums_follow_their_inputs(self, size: int) -> None:
        results = self.on_every_rank(partial(from_file, __file__, "recorded"), size)
        for step in range(6):
            parts = self.parts((size,), torch.bfloat16, step)
            for each in (2 * step, 2 * step + 1):
                self.check_sums([found[each] for found in results], total(parts), parts)
            assert self.fixed_order is False or same_bits(results[0][2 * step], total(parts))


class TestNcclInOrder(Gpus):
    name = "nccl"


class TestNccl(Gpus):
    name, fixed_order = "nccl", False


class TestPyNcclInOrder(Gpus):
    name = "pynccl"


class TestPyNccl(Gpus):
    name, fixed_order = "pynccl", False


class TestCustom(Gpus):
    name = "custom"


class TestCuda(Gpus):
    name, fixed_order = "cuda", False
