"""A gloo group where torch's NCCL group would be: the operations that are called are the same."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]


def gloo_group(store: Store, rank: int, world_size: int, timeout: float) -> Any:
    """In place of :func:`headrace_distributed.cuda.nccl.nccl_group`."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, world_size, options)
