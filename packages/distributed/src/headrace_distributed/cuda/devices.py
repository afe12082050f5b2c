"""The GPUs that a group's ranks compute on: which they are, and how they are linked."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_core.errors import ConfigError
from headrace_distributed.peers import Peer
from headrace_distributed.rendezvous import exchange


def own_gpu(communicator: str) -> torch.device:
    """This process's current GPU.

    Raises:
        ConfigError: there is none; names the communicator.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            f"parallel.communicator = {communicator!r}: needs a CUDA GPU for each rank, and torch "
            f"{torch.__version__} sees none; must be 'gloo' or 'shm' on a CPU",
            field="parallel.communicator",
        )
    return torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, slots=True)
class Gpu:
    """One rank's device."""

    uuid: str
    """NVIDIA's, without ``GPU-``; of a device that is no GPU, "": nothing is checked."""
    capability: tuple[int, int]

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{major}.{minor} {self.uuid}"


def describe(device: torch.device) -> Gpu:
    """What a device is."""
    if device.type != "cuda":
        return Gpu("", (0, 0))
    properties: Any = torch.cuda.get_device_properties(device)
    return Gpu(str(properties.uuid), (properties.major, properties.minor))


def parse_gpu(text: str) -> Gpu:
    """Read what a :class:`Gpu` was written as."""
    capability, uuid = text.split(" ", 1)
    major, minor = capability.split(".")
    return Gpu(uuid, (int(major), int(minor)))


def exchange_gpus(
    store: Store, rank: int, world_size: int, own: Gpu, timeout: float
) -> tuple[Gpu, ...]:
    """All ranks' devices, by rank; waits for all of them.

    Raises:
        ConfigError: two ranks have the same one, which NCCL cannot serve.
    """
    told = exchange(store, "gpu", rank, world_size, str(own), timeout)
    gpus = tuple(parse_gpu(text) for text in told)
    first: dict[str, int] = {}
    for peer, gpu in enumerate(gpus):
        if gpu.uuid and gpu.uuid in first:
            raise ConfigError(
                f"ranks {first[gpu.uuid]} and {peer} are both on GPU {gpu.uuid}: each rank needs its own; "
                "use fewer ranks, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
            )
        first[gpu.uuid] = peer
    return gpus


def fully_linked(gpus: Sequence[Gpu], peers: Sequence[Peer], nvml: Any = None) -> tuple[bool, str]:
    """True if NVLink joins every two of the GPUs; and why that is thought.

    Args:
        nvml: the module ``pynvml``; None: imported.
    """
    if len({peer.host for peer in peers}) > 1:
        return False, "the ranks are on several hosts"
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return False, "links are unknown: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu.uuid}") for gpu in gpus]
            for one, first in enumerate(handles):
                for other in range(one + 1, len(handles)):
                    status = nvml.nvmlDeviceGetP2PStatus(
                        first, handles[other], nvml.NVML_P2P_CAPS_INDEX_NVLINK
                    )
                    if status != nvml.NVML_P2P_STATUS_OK:
                        return False, f"no NVLink joins ranks {one} and {other}"
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return False, f"links are unknown: {error}"
    return True, "NVLink joins every two GPUs"
