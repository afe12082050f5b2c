"""The store of processes that a launcher has started (torchrun)."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from headrace_distributed.errors import PeerTimeout
from headrace_distributed.rendezvous import DEFAULT_TIMEOUT


def launched_store(host: str, port: int, serves: bool, timeout: float = DEFAULT_TIMEOUT) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT; torch's own, where the script has made its process group.

    Args:
        serves: this process is the one that serves it, as no launcher does.

    Raises:
        PeerTimeout: nobody serves it within ``timeout`` seconds.
    """
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    try:
        return TCPStore(
            host, port, is_master=serves, wait_for_workers=False, timeout=timedelta(seconds=timeout),
            multi_tenant=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise PeerTimeout(
            f"the store at MASTER_ADDR = {host!r}, MASTER_PORT = {port} cannot be used: {error}",
            rank=None,
        ) from error
