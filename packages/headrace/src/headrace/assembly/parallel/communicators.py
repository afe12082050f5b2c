"""Ways in which ranks exchange tensors: which suit a device, and which is taken where none is named."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headrace_core import plugins
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig
    from headrace_engine.multiproc.config import ParallelConfig

logger = logging.getLogger(__name__)

COMMUNICATORS = "headrace.communicators"
FIELD = "parallel.communicator"
OF_CPUS = ("gloo", "shm")
OF_GPUS = ("cuda", "custom", "symm_mem", "pynccl", "nccl")
"""Built-in ones; a plug-in's is left to itself."""


def check_device(wanted: str, device: str) -> None:
    """Refuse a communicator that is named and does not move a device's tensors.

    Raises:
        ConfigError: naming it.
    """
    if wanted in OF_GPUS and device != "cuda":
        raise ConfigError(
            f"{FIELD} = {wanted!r}: must be 'auto' or one of {', '.join(OF_CPUS)} on device {device!r}: it "
            "moves tensors of NVIDIA GPUs, and needs device 'cuda'",
            field=FIELD,
        )
    if wanted in OF_CPUS and device == "cuda":
        raise ConfigError(
            f"{FIELD} = {wanted!r}: must be 'auto' or one of {', '.join(OF_GPUS)} on device 'cuda': it moves "
            "tensors of the host's memory",
            field=FIELD,
        )


def check_gpus(parallel: ParallelConfig) -> None:
    """Refuse what ranks on GPUs do not do yet, and more ranks than there are GPUs.

    Raises:
        ConfigError: naming the setting.
    """
    for name, value, why in (
        ("pipeline_parallel_size", parallel.pipeline_parallel_size > 1,
         "stages exchange sizes through the host's memory"),
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1,
         "prompts are divided in the host's memory"),
        ("enable_eplb", parallel.enable_eplb, "tokens of experts are counted in the host's memory"),
        ("distributed_executor_backend", parallel.executor != "mp",
         "only ranks of 'mp' know which of their host's GPUs is theirs"),
    ):  # fmt: skip
        if value:
            raise ConfigError(
                f"parallel.{name} = {getattr(parallel, name)!r}: must be left out on device 'cuda': {why}",
                field=f"parallel.{name}",
            )
    import torch

    here, found = parallel.num_ranks // parallel.nnodes, torch.cuda.device_count()
    if here > found:
        raise ConfigError(
            f"parallel.{parallel.describe_ranks()}: must be at most {found * parallel.nnodes} here: each "
            f"rank needs a GPU of its own, and torch sees {found}",
            field="parallel.tensor_parallel_size",
        )


def communicator_name(config: EngineConfig, device: str) -> str:
    """The communicator of an engine's ranks, chosen if that was left open.

    Raises:
        ConfigError: it is of one rank.
        PluginNotFound: it is not installed.
    """
    wanted = config.parallel.communicator
    if wanted == "auto":
        wanted = _chosen(config.parallel, device)
        logger.info("communicator: auto -> %s", wanted)
    if wanted == "single":
        others = ", ".join(name for name in plugins.installed(COMMUNICATORS) if name != "single")
        raise ConfigError(
            f"{FIELD} = 'single': it has one rank, and {config.parallel.describe_ranks()}; "
            f"must be 'auto' or one of {others}",
            field=FIELD,
        )
    plugins.find(COMMUNICATORS, wanted)
    return wanted


def _chosen(parallel: ParallelConfig, device: str) -> str:
    if device == "cuda":
        return "cuda"
    on_this_host = parallel.nnodes == 1 and parallel.executor != "ray"
    return "shm" if on_this_host and _shares_memory() else "gloo"


def _shares_memory() -> bool:
    """True if ranks of this host can exchange tensors through memory."""
    try:
        from headrace_distributed.shm import library
    except ImportError:  # plugins.find says how to install what is missing
        return False
    return "shm" in plugins.installed(COMMUNICATORS) and library.available()
