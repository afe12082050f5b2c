"""Custom all-reduce: its kernels in Triton's interpreter, in processes that map each other's memory by
handles of a stand-in for CUDA's run time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import ConfigError, MissingDependency
from headrace_distributed.cuda import libnccl
from headrace_distributed.cuda.custom import cudart
from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.errors import GroupError
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import CommunicatorConformance, made, same_bits, total
from headrace_testing.engine.rank_processes import RankFailed, RankProcesses, from_file

pytest.importorskip("triton", reason="triton is not installed")

HERE = str(Path(__file__).with_name("host_ranks.py"))
MIB = 1 << 20


def processes(cudart: str, world_size: int, address: str, **options: Any) -> RankProcesses:
    options = {"one_shot": 4 * MIB, "block": 8192, **options}
    return RankProcesses(
        partial(from_file, HERE, "create", cudart=cudart, **options), world_size, address
    )


class TestOneShot(CommunicatorConformance):
    """Two processes; tensors of no multiple of 16 bytes go the other way."""

    ranks: ClassVar[RankProcesses]
    ONE_SHOT: ClassVar[int] = 4 * MIB
    WORLD_SIZE: ClassVar[int] = 2

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def started(cls, fake_cudart: str) -> Iterator[None]:
        with (
            RendezvousServer() as server,
            processes(
                fake_cudart, cls.WORLD_SIZE, server.address("tp"), one_shot=cls.ONE_SHOT
            ) as ranks,
        ):
            cls.ranks = ranks
            yield

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.ranks.on_every_rank(function, *arguments)


class TestTwoShot(TestOneShot):
    """Three processes."""

    ONE_SHOT = 0
    WORLD_SIZE = 3


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(5, marks=pytest.mark.days(3))])
def test_sums_of_every_size_follow_each_other(fake_cudart: str, world_size: int) -> None:
    """Both ways in turn, of one and of many programs, so that slots of operations lie over each other's."""
    sizes = (1, 3000, 17, 64 * world_size, 64 * world_size + 1, 5000, 2)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    calls = [
        (size, dtypes[step % 3], bool((step + turn) % 2))
        for turn in range(2)
        for step, size in enumerate(sizes)
    ]
    with (
        RendezvousServer() as server,
        processes(fake_cudart, world_size, server.address("tp"), block=128) as ranks,
    ):
        results = ranks.on_every_rank(partial(from_file, HERE, "sums"), calls)
    for rank in range(world_size):
        for step, (size, dtype, _) in enumerate(calls):
            parts = [made(peer, (size,), dtype, step) for peer in range(world_size)]
            assert same_bits(results[rank][step], total(parts)), (rank, step, calls[step])


def test_the_table_says_what_runs(fake_cudart: str) -> None:
    with (
        RendezvousServer() as server,
        processes(fake_cudart, 3, server.address("tp"), one_shot=1024) as ranks,
    ):
        sizes = (1024, 1040, 4 * MIB, 4 * MIB + 16, 34)
        [found, *others] = ranks.on_every_rank(partial(from_file, HERE, "names"), sizes)
    assert found == ["custom one-shot", "custom two-shot", "custom two-shot", "pynccl", "pynccl"]
    assert others == [found, found]


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        (
            "without_peers",
            "rank 1: cudaIpcOpenMemHandle returned 217 (peer access is not supported",
        ),
        ("without_memory", "rank 0: rank 1 could not allocate; 'cuda' uses what works"),
    ],
)
def test_memory_that_one_rank_lacks_is_refused_by_all(
    fake_cudart: str, lacks: str, reason: str
) -> None:
    with RendezvousServer() as server:
        address = server.address("tp")
        with pytest.raises(RankFailed) as caught:
            processes(fake_cudart, 2, address, **{lacks: 1})
    assert caught.value.kind == "ConfigError"
    assert caught.value.message.startswith(f"parallel.communicator = 'custom': {reason}")


def test_a_tensor_that_does_not_fit_is_refused(fake_cudart: str) -> None:
    with RendezvousServer() as server, processes(fake_cudart, 2, server.address("tp")) as ranks:
        for size, dtype in ((4 * MIB, torch.float16), (4, torch.float64)):
            with pytest.raises(
                RankFailed, match=r"ValueError: all_reduce: .* must be at most 4194304 of"
            ):
                ranks.on_every_rank(partial(from_file, HERE, "sums"), [(size, dtype, False)])


def test_memory_comes_zeroed_and_is_checked(
    fake_cudart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctypes

    runtime = CudaRuntime(fake_cudart)
    address = runtime.allocate(4096)
    assert ctypes.string_at(address, 4096) == bytes(4096)
    handle = runtime.handle_of(address)
    seen = runtime.open(handle)
    ctypes.memset(address, 7, 16)
    assert ctypes.string_at(seen, 16) == bytes([7] * 16)
    with pytest.raises(GroupError, match=r"cudaFree returned 1 \(invalid argument\)"):
        runtime.free(seen)
    with pytest.raises(ValueError, match="a handle of 3 bytes: must be 64"):
        runtime.open(b"abc")
    runtime.close(seen)
    runtime.free(address)
    with pytest.raises(GroupError, match="cudaIpcOpenMemHandle returned 1"):
        runtime.open(handle)
    monkeypatch.setenv("FAKE_CUDART_LIMIT", "100")
    with pytest.raises(GroupError, match=r"cudaMalloc returned 2 \(out of memory\)"):
        runtime.allocate(4096)


def test_no_library_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingDependency, match="HEADRACE_CUDART_SO_PATH"):
        CudaRuntime(str(tmp_path / "libcudart.so"))
    monkeypatch.setattr(cudart, "loaded", lambda name: None)
    with pytest.raises(MissingDependency, match="torch has loaded none"):
        CudaRuntime()
    monkeypatch.setenv(cudart.PATH_VARIABLE, "/nowhere/libcudart.so")
    with pytest.raises(
        ConfigError, match=r"HEADRACE_CUDART_SO_PATH = '/nowhere/libcudart.so': must be"
    ):
        CudaRuntime()


def test_a_mapped_library_is_found_by_its_name() -> None:
    assert libnccl.loaded("libc.") or libnccl.loaded("libc-")
    assert libnccl.loaded("libnothing") is None
