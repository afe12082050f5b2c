"""NCCL by ctypes over a stand-in, in processes: the suite in both orders; the loader, codes and handles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from headrace_core.errors import ConfigError, MissingDependency
from headrace_distributed.cuda import libnccl, pynccl
from headrace_distributed.cuda.libnccl import NcclLibrary, UniqueId
from headrace_distributed.cuda.pynccl import PyNccl
from headrace_distributed.errors import GroupError
from headrace_distributed.rendezvous import RendezvousServer
from headrace_testing.engine.communicators import (
    CommunicatorConformance,
    made,
    met,
    reduced,
    told,
)  # fmt: skip
from headrace_testing.engine.rank_processes import RankFailed, RankProcesses

CPU = torch.device("cpu")
STREAM = partial(int, 0x57E4A)
"""What the stand-in takes as a stream, and nothing else."""


def maker(library: str, **options: Any) -> Callable[..., Any]:
    return partial(
        pynccl.create, device=CPU, library=library, stream=STREAM, timeout=60.0, **options
    )


class TestFixedOrder(CommunicatorConformance):
    """Three processes."""

    ranks: ClassVar[RankProcesses]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def processes(cls, fake_nccl: str) -> Iterator[None]:
        make = maker(fake_nccl, fixed_order=cls.fixed_order)
        with RendezvousServer() as server, RankProcesses(make, 3, server.address("tp")) as ranks:
            cls.ranks = ranks
            yield

    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        return self.ranks.on_every_rank(function, *arguments)


class TestOrderOfTheLibrary(TestFixedOrder):
    fixed_order = False


@pytest.fixture
def two(fake_nccl: str) -> Iterator[RankProcesses]:
    with (
        RendezvousServer() as server,
        RankProcesses(maker(fake_nccl, fixed_order=False), 2, server.address("tp")) as ranks,
    ):
        yield ranks


def disagreeing(ranks: RankProcesses, *calls: tuple[Any, ...]) -> list[str]:
    for rank, call in enumerate(calls):
        ranks.begin(rank, *call)
    failures = [ranks.outcome(rank) for rank in range(len(calls))]
    assert all(isinstance(f, RankFailed) and f.kind == "GroupError" for f in failures), failures
    return [failure.message for failure in failures]


def test_codes_that_are_not_success_are_told_with_the_function(two: RankProcesses) -> None:
    messages = disagreeing(two, (reduced, (3,), torch.float32), (reduced, (3,), torch.float16))
    assert (
        messages
        == [
            "all_reduce: ncclAllReduce returned 5 (invalid usage): ranks called different operations"
        ]
        * 2
    )
    messages = disagreeing(two, (told, (3,), torch.float32, 0), (told, (3,), torch.float32, 1))
    assert all(message.startswith("broadcast: ncclBroadcast returned 5") for message in messages)
    messages = disagreeing(two, (met,), (reduced, (1,), torch.int32))
    assert messages[0].startswith("barrier: ncclAllGather returned 5")


@pytest.fixture
def alone(fake_nccl: str) -> Iterator[PyNccl]:
    with RendezvousServer() as server:
        group = maker(fake_nccl)(0, 1, server.address("tp"))
        assert isinstance(group, PyNccl)
        yield group
        group.close()


def test_a_function_that_fails_is_named(alone: PyNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NCCL_FAILS", "ncclAllReduce")
    with pytest.raises(
        GroupError,
        match=r"^all_reduce: ncclAllReduce returned 2 \(unhandled system error\): a cable was pulled$",
    ):
        alone.all_reduce(torch.ones(3))


def test_a_failure_behind_the_stream_is_found(
    alone: PyNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.check()
    monkeypatch.setenv("FAKE_NCCL_ASYNC_ERROR", "1")
    with pytest.raises(GroupError, match=r"returned 2 \(unhandled system error\): a peer has gone"):
        alone.check()


def test_another_stream_is_another_stream(fake_nccl: str) -> None:
    """The stand-in sees the stream that is given, so that this file shows it is."""
    make = partial(pynccl.create, device=CPU, library=fake_nccl, stream=partial(int, 3))
    with RendezvousServer() as server, pytest.raises(GroupError, match="stream is another one"):
        make(0, 1, server.address("tp"))


def test_a_group_that_was_left_says_so(alone: PyNccl) -> None:
    alone.close()
    alone.close()
    for call in (alone.barrier, alone.check, lambda: alone.all_reduce(torch.ones(1))):
        with pytest.raises(GroupError, match="rank 0 has left the group"):
            call()


def test_a_group_may_be_left_at_once(alone: PyNccl) -> None:
    alone.abort()
    with pytest.raises(GroupError, match="rank 0 has left the group"):
        alone.barrier()


def test_a_handle_that_was_destroyed_is_refused(fake_nccl: str) -> None:
    library = NcclLibrary(fake_nccl)
    comm = library.join(library.unique_id(), 0, 1)
    library.call("ncclCommDestroy", comm)
    with pytest.raises(GroupError, match=r"ncclCommDestroy returned 4 \(invalid argument\)"):
        library.call("ncclCommDestroy", comm)


def test_the_whole_id_travels(fake_nccl: str) -> None:
    """Its bytes are any, zeros among them."""
    library = NcclLibrary(fake_nccl)
    made_id = library.unique_id()
    assert len(made_id) == libnccl.UNIQUE_ID_BYTES == len(bytes(UniqueId()))
    assert b"\0" in made_id
    assert made_id[-1] == 0x7F
    with pytest.raises(ValueError, match="has 3 bytes: must be 128"):
        library.join(b"abc", 0, 1)
    with pytest.raises(GroupError, match=r"joining: ncclCommInitRank returned 4 .*the id was cut"):
        library.join(made_id[:64] + bytes(64), 0, 1)


@pytest.mark.parametrize(("code", "version"), [("22703", (2, 27, 3)), ("21000", (2, 10, 0))])
def test_version(
    fake_nccl: str, monkeypatch: pytest.MonkeyPatch, code: str, version: tuple[int, int, int]
) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", code)
    assert NcclLibrary(fake_nccl).version == version


@pytest.mark.parametrize("code", ["2804", "20906"])
def test_a_version_that_is_too_old_is_refused(
    fake_nccl: str, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.setenv("FAKE_NCCL_VERSION", code)
    with pytest.raises(MissingDependency, match=r"libnccl.so.2 .*: 2\.[89]\.[46]"):
        NcclLibrary(fake_nccl)


def test_the_named_library_is_taken(fake_nccl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(libnccl.PATH_VARIABLE, fake_nccl)
    assert NcclLibrary().path == fake_nccl
    monkeypatch.setenv(libnccl.PATH_VARIABLE, "/nowhere/libnccl.so.2")
    with pytest.raises(
        ConfigError, match=r"HEADRACE_NCCL_SO_PATH = '/nowhere/libnccl.so.2': must be"
    ):
        NcclLibrary()


def test_a_loaded_library_is_found(fake_nccl: str, tmp_path: Path) -> None:
    """As torch's is: in a process that has mapped it, by its file's name."""
    code = (
        "import ctypes, sys; from headrace_distributed.cuda.libnccl import find, loaded; "
        "assert loaded('libnccl') is None; before = find(); ctypes.CDLL(sys.argv[1]); "
        "print(before); print(find())"
    )
    other = tmp_path / "libnccl.so.2.27.3"
    other.symlink_to(fake_nccl)
    copy = tmp_path / "real" / "libnccl.so.2"
    copy.parent.mkdir()
    copy.write_bytes(Path(fake_nccl).read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == str(copy)


def test_torch_s_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "nccl" / "lib"
    folder.mkdir(parents=True)
    (folder / libnccl.NAME).write_bytes(b"")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(libnccl, "loaded", lambda name: None)
    assert libnccl.find() == str(folder / libnccl.NAME)


def test_no_library_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="HEADRACE_NCCL_SO_PATH") as caught:
        NcclLibrary(str(tmp_path / "libnccl.so.2"))
    assert "communicator 'pynccl'" in str(caught.value)
    empty = tmp_path / "libempty.so"
    empty.write_bytes(b"")
    with pytest.raises(MissingDependency, match=r"libempty\.so"):
        NcclLibrary(str(empty))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_machine_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"parallel.communicator = 'pynccl': needs a CUDA GPU"):
        pynccl.create(0, 2, "tcp://127.0.0.1:77/tp")


def test_sums_of_one_rank_are_its_own(alone: PyNccl) -> None:
    tensor = made(0, (1000,), torch.bfloat16)
    assert torch.equal(alone.all_reduce(tensor), tensor)
