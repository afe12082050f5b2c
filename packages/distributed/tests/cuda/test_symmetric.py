"""torch's symmetric memory with stand-ins for its memory and its kernels, whose schemas are torch's own;
and the communicator that chooses it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_distributed.cuda import joining, nccl
from headrace_distributed.cuda.choice import KIB, Limits
from headrace_distributed.cuda.chosen import AdaptiveCommunicator, Parts, create
from headrace_distributed.cuda.devices import Gpu
from headrace_distributed.cuda.joining import GpuRanks
from headrace_distributed.cuda.symmetric import SymmetricAllReduce
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import CommunicatorConformance
from headrace_testing.engine.rank_processes import from_file

CPU = torch.device("cpu")
gloo_group = partial(from_file, str(Path(__file__).with_name("gloo_group.py")), "gloo_group")
WORLD_SIZE = 2


class Memory:
    """One rank's ``_SymmetricMemory``: buffers of a group's ranks, who are threads."""

    groups: ClassVar[dict[str, tuple[threading.Barrier, dict[int, torch.Tensor]]]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()
    calls: ClassVar[list[str]] = []

    def __init__(self, rank: int, *, multicast: bool = True, fails: bool = False) -> None:
        self.rank, self.multicast, self.fails = rank, multicast, fails

    def set_group_info(self, name: str, rank: int, world_size: int, store: Store) -> None:
        assert rank == self.rank
        assert isinstance(store, Store)
        with self.lock:
            self.groups.setdefault(name, (threading.Barrier(world_size), {}))

    def empty_strided_p2p(
        self,
        size: tuple[int],
        stride: tuple[int],
        dtype: torch.dtype,
        device: torch.device,
        name: str,
    ) -> torch.Tensor:
        assert name in self.groups
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, name: str) -> Any:
        if self.fails:
            raise RuntimeError("no fabric")
        self.groups[name][1][self.rank] = tensor
        return type("Handle", (), {"multicast_ptr": 4096 if self.multicast else 0})()


def fake_kernel(way: str) -> Callable[[torch.Tensor, str, str], torch.Tensor]:
    def kernel(own: torch.Tensor, reduce_op: str, name: str) -> torch.Tensor:
        assert reduce_op == "sum"
        barrier, buffers = Memory.groups[name]
        Memory.calls.append(way)
        barrier.wait(20)
        total = sum(buffers[rank][: own.numel()] for rank in sorted(buffers))
        barrier.wait(20)
        assert isinstance(total, torch.Tensor)
        return own.copy_(total)

    return kernel


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[None]:
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for way in ("multimem", "two_shot"):
        library.impl(f"{way}_all_reduce_", fake_kernel(way))
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "describe", lambda device: Gpu("", (9, 0)))


def make(
    rank: int,
    address: str,
    *,
    limits: Limits | None = None,
    world_size: int = WORLD_SIZE,
    **memory: bool,
) -> Communicator:
    def base(ranks: GpuRanks, fixed_order: bool) -> Communicator:
        return nccl.join(ranks, fixed_order=fixed_order, make_group=gloo_group)

    return create(
        rank, world_size, address, timeout=30.0, device=CPU, fixed_order=False, wanted=("symm_mem",),
        required=("symm_mem",), limits=Limits() if limits is None else limits,
        parts=Parts(base=base, symm_mem=Memory(rank, **memory)),
    )  # fmt: skip


class Custom:
    """In place of custom all-reduce: a group's, which gives rank ``wrong`` something else."""

    made: ClassVar[list[Custom]] = []

    def __init__(self, base: Communicator, num_bytes: int, wrong: int) -> None:
        self.base, self.num_bytes, self.wrong = base, num_bytes, wrong
        self.unmapped = self.freed = False
        self.made.append(self)

    def all_reduce(self, tensor: torch.Tensor, *, two_shot: bool) -> torch.Tensor:
        total = self.base.all_reduce(tensor.clone())
        return total + 1 if self.base.rank == self.wrong else total

    def unmap(self) -> None:
        self.unmapped = True

    def free(self) -> None:
        self.freed = True


def join_both(rank: int, address: str, wrong: int = -1) -> Communicator:
    """A rank of two that has symmetric memory and custom all-reduce."""
    bases: list[Communicator] = []

    def base(ranks: GpuRanks, fixed_order: bool) -> Communicator:
        bases.append(nccl.join(ranks, fixed_order=fixed_order, make_group=gloo_group))
        return bases[0]

    def custom(ranks: GpuRanks, most: int) -> Any:
        return Custom(bases[0], most, wrong)

    parts = Parts(base=base, symm_mem=Memory(rank), custom=custom)
    return create(rank, 2, address, timeout=30.0, device=CPU, fixed_order=False, parts=parts)


def groups(pool: ThreadPoolExecutor, address: str, **options: Any) -> list[Any]:
    """By rank: the communicator, or what was raised."""
    joined = [pool.submit(make, rank, address, **options) for rank in range(WORLD_SIZE)]
    return [each.exception() or each.result() for each in joined]


class TestSymmetricMemory(CommunicatorConformance):
    """Two threads; tensors of bfloat16 go through symmetric memory."""

    fixed_order = False
    found: ClassVar[list[Communicator]]
    pool: ClassVar[ThreadPoolExecutor]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def threads(cls) -> Iterator[None]:
        with (
            pytest.MonkeyPatch.context() as patch,
            RendezvousServer() as server,
            ThreadPoolExecutor(WORLD_SIZE) as pool,
        ):
            patch.setattr(joining, "describe", lambda device: Gpu("", (9, 0)))
            cls.pool, cls.found = pool, groups(pool, server.address("tp"))
            yield
            for group in cls.found:
                group.close()

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return list(self.pool.map(lambda group: function(group, *arguments), self.found))


@pytest.mark.parametrize(
    ("multicast", "way"), [([True, True], "multimem"), ([True, False], "two_shot")]
)
def test_the_switch_adds_up_where_every_rank_has_it(multicast: list[bool], way: str) -> None:
    limits = Limits(multimem={(9, 0): frozenset({WORLD_SIZE})})
    Memory.calls.clear()
    with RendezvousServer() as server, ThreadPoolExecutor(WORLD_SIZE) as pool:
        address = server.address("tp")
        joined = [
            pool.submit(make, rank, address, limits=limits, multicast=multicast[rank])
            for rank in range(WORLD_SIZE)
        ]
        found = [each.result() for each in joined]
        tensor = torch.ones(100, dtype=torch.bfloat16)
        sums = list(pool.map(lambda group: group.all_reduce(tensor), found))
    assert all(torch.equal(each, 2 * tensor) for each in sums)
    assert Memory.calls[-2:] == [way, way]
    assert ("multimem" in Memory.calls) is all(multicast)
    assert torch.equal(tensor, torch.ones_like(tensor)), "the result is in new memory"


def test_a_rank_that_cannot_makes_all_refuse_by_name() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(WORLD_SIZE) as pool:
        address = server.address("tp")
        joined = [pool.submit(make, rank, address, fails=rank == 1) for rank in range(WORLD_SIZE)]
        errors = [each.exception() for each in joined]
    for error in errors:
        assert isinstance(error, ConfigError)
        assert str(error) == (
            "parallel.communicator = 'symm_mem': rank 1: symmetric memory: no fabric; 'cuda' uses what "
            "works, 'pynccl' NCCL alone"
        )


def test_a_gpu_that_is_in_no_table_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "describe", lambda device: Gpu("", (8, 6)))
    with RendezvousServer() as server, ThreadPoolExecutor(WORLD_SIZE) as pool:
        errors = groups(pool, server.address("tp"))
    assert all("capability 8.6 with 2 ranks is not in its table" in str(error) for error in errors)


def test_what_is_only_tried_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """``cuda`` goes on without; rank 0 says why, and what adds up."""
    caplog.set_level("INFO", logger="headrace_distributed.cuda.chosen")

    def join(rank: int, address: str) -> Communicator:
        def base(ranks: GpuRanks, fixed_order: bool) -> Communicator:
            return nccl.join(ranks, fixed_order=fixed_order, make_group=gloo_group)

        parts = Parts(base=base, symm_mem=Memory(rank, fails=rank == 1))
        return create(
            rank, 2, address, timeout=30.0, device=CPU, fixed_order=False, wanted=("symm_mem",),
            parts=parts,
        )  # fmt: skip

    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        address = server.address("tp")
        found = list(pool.map(join, range(2), [address] * 2))
        sums = list(pool.map(lambda group: group.all_reduce(torch.ones(8)), found))
    assert all(torch.equal(each, torch.full((8,), 2.0)) for each in sums)
    assert [record.getMessage() for record in caplog.records] == [
        "communicator 'cuda': no symm_mem: rank 1: symmetric memory: no fabric",
        "communicator 'cuda': all-reduce: pynccl (NCCL on the current stream, which a graph can record)",
    ]


def test_custom_memory_holds_what_the_table_gives_it_beside_symmetric_memory() -> None:
    """Both are tried; 9.0 with two ranks takes custom all-reduce up to 64 MiB then."""
    Custom.made.clear()
    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(join_both, range(2), [server.address("tp")] * 2))
    assert isinstance(groups[0], AdaptiveCommunicator)
    assert groups[0].describe().startswith("custom one-shot up to 64 MiB")
    assert [each.num_bytes for each in Custom.made] == [64 << 20] * 2
    for group in groups:
        group.close()


def test_wrong_sums_are_found_before_they_are_used(caplog: pytest.LogCaptureFixture) -> None:
    """One rank reads something else than the others wrote: nobody uses that way."""
    caplog.set_level("INFO", logger="headrace_distributed.cuda.chosen")
    Custom.made.clear()
    with RendezvousServer() as server, ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(join_both, range(2), [server.address("tp")] * 2, [-1, 1]))
    for group in groups:
        assert isinstance(group, AdaptiveCommunicator)
        assert group.describe().startswith("symm_mem two-shot up to 64 MiB")
        group.close()
    assert all(each.unmapped and each.freed for each in Custom.made)
    assert caplog.records[0].getMessage() == (
        "communicator 'cuda': no custom: rank 1: custom one-shot gave a wrong sum: the GPUs do not read what "
        "the others wrote"
    )


def test_sizes_and_types_that_do_not_fit_are_refused() -> None:
    memory = Memory(0)
    with RendezvousServer() as server:
        ranks = joining.meet("symm_mem", 0, 1, server.address("tp"), CPU, 30.0)
        symmetric = SymmetricAllReduce(ranks, KIB, "alone", memory)
    for tensor in (torch.ones(4), torch.ones(513, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="must be at most 1024 of bfloat16"):
            symmetric.all_reduce(tensor, multimem=False)
    symmetric.close()


def test_the_choice_is_that_of_the_tensor() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(WORLD_SIZE) as pool:
        group = groups(pool, server.address("tp"))[0]
    assert isinstance(group, AdaptiveCommunicator)
    assert group.choice_for(torch.ones(8, dtype=torch.bfloat16)).name == "symm_mem two-shot"
    assert group.choice_for(torch.ones(8)).name == "pynccl"
    assert group.choice_for(torch.ones(3, dtype=torch.bfloat16)).passed_over[
        "symm_mem two-shot"
    ] == ("no multiple of 4 bytes")
    assert "symm_mem two-shot up to 64 MiB" in group.describe()
