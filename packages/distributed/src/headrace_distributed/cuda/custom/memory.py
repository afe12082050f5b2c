"""Memory of all ranks' GPUs that each of them has mapped."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.rendezvous import exchange


class MappedMemory:
    """One allocation of each rank, seen by all; a collective: every rank makes one at the same time.

    Args:
        store: where the ranks' handles are exchanged, as hexadecimal digits.
        num_bytes: of a rank's allocation; the same for all.
        device: the current device, to which addresses belong.
        timeout: seconds to wait for another rank.

    Raises:
        GroupError: an allocation cannot be made or mapped.
        PeerTimeout: a rank has not come in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        num_bytes: int,
        device: torch.device,
        timeout: float,
        runtime: CudaRuntime,
    ) -> None:
        self._runtime, self._rank = runtime, rank
        self._addresses: list[int] = []
        own = runtime.allocate(num_bytes)
        told = exchange(store, "memory", rank, world_size, runtime.handle_of(own).hex(), timeout)
        for peer, handle in enumerate(told):
            self._addresses.append(own if peer == rank else runtime.open(bytes.fromhex(handle)))
        self.addresses: Tensor = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        """[world_size] int64: where this rank's kernels see each one's allocation."""

    def unmap(self) -> None:
        """Let go of the others' memory, once what runs on the device has ended. Idempotent."""
        self._runtime.call("cudaDeviceSynchronize")
        for peer, address in enumerate(self._addresses):
            if peer != self._rank:
                self._runtime.close(address)
        self._addresses = self._addresses[self._rank : self._rank + 1]
        self._rank = 0

    def free(self) -> None:
        """Give the own memory back; all ranks have called :meth:`unmap`. Idempotent."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            self._runtime.free(address)
