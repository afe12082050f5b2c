"""torch's NCCL group: the suite with a gloo group in its place, whose tensors are on the CPU; refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.parallel import Communicator
from headrace_distributed.cuda import nccl, settings
from headrace_distributed.errors import GroupError
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import CommunicatorConformance
from headrace_testing.engine.rank_processes import from_file

CPU = torch.device("cpu")
gloo_group = partial(from_file, str(Path(__file__).with_name("gloo_group.py")), "gloo_group")


def make(rank: int, world_size: int, address: str, **options: Any) -> Communicator:
    options = {"device": CPU, "make_group": gloo_group, "timeout": 60.0, **options}
    return nccl.create(rank, world_size, address, **options)


class TestFixedOrder(CommunicatorConformance):
    """Three ranks as threads."""

    groups: ClassVar[list[Communicator]]
    pool: ClassVar[ThreadPoolExecutor]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads(cls) -> Iterator[None]:
        with RendezvousServer() as server, ThreadPoolExecutor(3) as pool:
            address = server.address("tp")
            ranks = range(3)
            cls.groups = list(
                pool.map(lambda rank: make(rank, 3, address, fixed_order=cls.fixed_order), ranks)
            )
            cls.pool = pool
            yield
            for group in cls.groups:
                group.close()

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self.pool.map(lambda group: function(group, *arguments), self.groups))


class TestOrderOfTheLibrary(TestFixedOrder):
    fixed_order = False


@pytest.fixture
def one() -> Iterator[Communicator]:
    with RendezvousServer() as server:
        group = make(0, 1, server.address("tp"))
        yield group
        group.close()


def test_a_tensor_elsewhere_is_refused(one: Communicator) -> None:
    with pytest.raises(ValueError, match="all_reduce: the tensor is on meta, must be on cpu"):
        one.all_reduce(torch.ones(3, device="meta"))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
def test_types_that_cannot_be_added_are_refused(one: Communicator, operation: str) -> None:
    with pytest.raises(ValueError, match=f"{operation}: tensors of bool cannot be added up"):
        getattr(one, operation)(torch.ones(3, dtype=torch.bool))


def test_a_group_that_was_left_says_so(one: Communicator) -> None:
    one.close()
    with pytest.raises(GroupError, match="all_reduce: rank 0 has left the group"):
        one.all_reduce(torch.ones(3))


def test_a_rank_that_is_late_ends_the_group() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        address = server.address("tp")
        ranks = range(2)
        groups = list(pool.map(lambda rank: make(rank, 2, address, timeout=1.0), ranks))
        with pytest.raises(GroupError, match="all_reduce: "):
            groups[0].all_reduce(torch.ones(3))
        with pytest.raises(GroupError, match="all_reduce: rank 0 has left the group"):
            groups[0].all_reduce(torch.ones(3))


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_order_is_asked_for_by_environment(
    monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool
) -> None:
    monkeypatch.delenv("HEADRACE_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("HEADRACE_BATCH_INVARIANT", value)
    assert settings.fixed_order() is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_machine_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"parallel.communicator = 'nccl': needs a CUDA GPU"
    ) as caught:
        nccl.create(0, 2, "tcp://127.0.0.1:77/tp")
    assert caught.value.field == "parallel.communicator"


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="torch has NCCL here")
def test_torch_without_nccl_is_refused_by_name() -> None:
    with RendezvousServer() as server, pytest.raises(MissingDependency, match="torch with NCCL"):
        nccl.create(0, 1, server.address("tp"), device=CPU)
