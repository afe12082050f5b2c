"""Ranks of custom all-reduce without a GPU: kernels in Triton's interpreter, over memory of the host that
processes map by a stand-in for CUDA's run time. Loaded by ranks' processes (``from_file``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from headrace_core.parallel import Communicator
from headrace_distributed.cuda import nccl
from headrace_distributed.cuda.choice import Limits
from headrace_distributed.cuda.chosen import AdaptiveCommunicator, Parts
from headrace_distributed.cuda.chosen import create as create_chosen
from headrace_distributed.cuda.custom.all_reduce import CustomAllReduce
from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.cuda.joining import GpuRanks
from headrace_testing.engine.communicators import made
from headrace_testing.engine.rank_processes import from_file

MIB = 1 << 20
gloo_group = partial(from_file, str(Path(__file__).with_name("gloo_group.py")), "gloo_group")


def create(
    rank: int,
    world_size: int,
    rendezvous: str,
    *,
    cudart: str,
    one_shot: int,
    block: int,
    without_peers: int = -1,
    without_memory: int = -1,
) -> Communicator:
    """A group that takes custom all-reduce up to 4 MiB, one-shot up to ``one_shot`` bytes.
    Rank ``without_peers`` cannot map others' memory, rank ``without_memory`` not allocate its own."""
    if rank == without_memory:
        os.environ["FAKE_CUDART_LIMIT"] = "1000"
    if rank == without_peers:
        os.environ["FAKE_CUDART_NO_PEERS"] = "1"

    def custom(ranks: GpuRanks, most: int) -> CustomAllReduce:
        return CustomAllReduce(ranks, most, CudaRuntime(cudart), block)

    def base(ranks: GpuRanks, fixed_order: bool) -> Communicator:
        return nccl.join(ranks, fixed_order=fixed_order, make_group=gloo_group)

    return create_chosen(
        rank, world_size, rendezvous, timeout=60.0, device=torch.device("cpu"), fixed_order=True,
        wanted=("custom",), required=("custom",),
        limits=Limits(one_shot={world_size: one_shot}, custom=4 * MIB),
        parts=Parts(base=base, custom=custom, nvml=AllLinked),
    )  # fmt: skip


class AllLinked:
    """As much of pynvml as is asked."""

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    NVMLError = RuntimeError

    @staticmethod
    def nvmlInit() -> None:
        return None

    @staticmethod
    def nvmlShutdown() -> None:
        return None

    @staticmethod
    def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
        return uuid

    @staticmethod
    def nvmlDeviceGetP2PStatus(one: str, other: str, index: int) -> int:
        return 0


def sums(group: Communicator, calls: Sequence[tuple[int, torch.dtype, bool]]) -> list[torch.Tensor]:
    """Custom sums one after the other, of (elements, dtype, two-shot)."""
    assert isinstance(group, AdaptiveCommunicator)
    assert group._custom is not None
    return [
        group._custom.all_reduce(made(group.rank, (size,), dtype, step), two_shot=two_shot)
        for step, (size, dtype, two_shot) in enumerate(calls)
    ]


def names(group: Communicator, sizes: Sequence[int]) -> list[str]:
    """What adds up tensors of so many bytes."""
    assert isinstance(group, AdaptiveCommunicator)
    return [group.choice_for(torch.empty(size, dtype=torch.uint8).view(torch.bfloat16)).name
            for size in sizes]  # fmt: skip
