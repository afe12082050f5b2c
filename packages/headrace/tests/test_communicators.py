"""Which communicator suits a device: refused by name before anything is loaded, or chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headrace.assembly.detection import CudaPlatform
from headrace.assembly.parallel.communicators import OF_GPUS, communicator_name
from headrace.assembly.parallel.ranks import Ranks, check_ranks
from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform, Platform
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.config import ParallelConfig
from headrace_engine.multiproc.places import RankPlace

INFO: Any = SimpleNamespace()
"""Nothing is asked of the model."""


def config(**parallel: Any) -> EngineConfig:
    return EngineConfig(parallel=ParallelConfig(**parallel))


def check(platform: Platform, **parallel: Any) -> None:
    check_ranks(config(**parallel), INFO, platform)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.parametrize("name", OF_GPUS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_those_of_gpus_are_refused_on_a_cpu(name: str, ranks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check(CpuPlatform(), communicator=name, tensor_parallel_size=ranks)
    assert caught.value.field == "parallel.communicator"
    assert str(caught.value) == (
        f"parallel.communicator = {name!r}: must be 'auto' or one of gloo, shm on device 'cpu': it moves "
        "tensors of NVIDIA GPUs, and needs device 'cuda'"
    )


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_those_of_cpus_are_refused_on_gpus(four_gpus: None, name: str) -> None:
    with pytest.raises(
        ConfigError, match=f"parallel.communicator = {name!r}: must be 'auto' or one of cuda"
    ):
        check(CudaPlatform(), communicator=name, tensor_parallel_size=2)


@pytest.mark.parametrize("name", ["auto", *OF_GPUS])
def test_ranks_have_a_gpu_each(four_gpus: None, name: str) -> None:
    check(CudaPlatform(), communicator=name, tensor_parallel_size=4)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size = 8: must be at most 4 here: .* sees 4"
    ):
        check(CudaPlatform(), communicator=name, tensor_parallel_size=8)


def test_each_host_has_its_gpus(four_gpus: None) -> None:
    check(
        CudaPlatform(),
        communicator="nccl",
        tensor_parallel_size=8,
        nnodes=2,
        master_addr="127.0.0.1",
    )


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}, "enable_eplb"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"},
         "distributed_executor_backend"),
    ],
)  # fmt: skip
def test_what_ranks_on_gpus_do_not_do_is_refused(
    four_gpus: None, settings: dict[str, Any], field: str
) -> None:
    with pytest.raises(ConfigError, match="must be left out on device 'cuda'") as caught:
        check(CudaPlatform(), **settings)
    assert caught.value.field == f"parallel.{field}"


def test_gpus_choose_by_size() -> None:
    assert communicator_name(config(tensor_parallel_size=2), "cuda") == "cuda"
    assert communicator_name(config(tensor_parallel_size=2), "cpu") in ("shm", "gloo")


def test_all_are_installed() -> None:
    assert set(OF_GPUS) <= set(plugins.installed("headrace.communicators"))
    for name in OF_GPUS:
        assert callable(plugins.load("headrace.communicators", name))


def test_what_is_reported() -> None:
    """The name, and of a communicator that chooses by size how it does."""
    assert Ranks().report() == {}
    ranks = Ranks(RankPlace(0, 2, "cuda", {"tp:0": ""}))
    assert ranks.report() == {"communicator": "cuda"}
    ranks._groups["tp:0"] = cast(Communicator, SimpleNamespace(describe=lambda: "pynccl (...)"))
    assert ranks.report() == {"communicator": "cuda", "all_reduce": "pynccl (...)"}


def test_a_rank_s_thread_computes_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    Ranks(RankPlace(5, 8, num_here=4)).use_device("cuda")
    Ranks(RankPlace(5, 8, num_here=4)).use_device("cpu")
    Ranks().use_device("cuda")
    assert chosen == [1], "of its number on its host; one rank alone keeps the device that is set"
