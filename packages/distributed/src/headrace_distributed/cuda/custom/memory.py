"""Memory of all ranks' GPUs that each of them has mapped."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.cuda.joining import GpuRanks
from headrace_distributed.errors import GroupError


class MappedMemory:
    """One allocation of each rank, seen by all; a collective: every rank makes one at the same time.

    Args:
        ranks: they have met; handles are exchanged as hexadecimal digits.
        num_bytes: of a rank's allocation; the same for all.

    Raises:
        GroupError: an allocation cannot be made or mapped, here or by another rank.
        PeerTimeout: a rank has not come in time.
    """

    def __init__(self, ranks: GpuRanks, num_bytes: int, runtime: CudaRuntime) -> None:
        self._runtime, self._rank = runtime, ranks.rank
        own, failure = 0, None
        try:
            own = runtime.allocate(num_bytes)
        except GroupError as error:  # which the others must be told
            failure = error
        handle = runtime.handle_of(own).hex() if own else ""
        self._addresses: dict[int, int] = {ranks.rank: own} if own else {}
        """By rank: where its allocation is seen."""
        told = ranks.told_by_all("memory", handle)
        if failure is not None:
            raise failure
        try:
            for peer, handle in enumerate(told):
                if peer != ranks.rank:
                    self._addresses[peer] = self._opened(peer, handle)
        except GroupError:
            self.unmap()
            raise
        self.addresses: Tensor = torch.tensor(
            [self._addresses[peer] for peer in range(ranks.world_size)],
            dtype=torch.int64,
            device=ranks.device,
        )
        """[world_size] int64: where this rank's kernels see each one's allocation."""

    def _opened(self, peer: int, handle: str) -> int:
        if not handle:
            raise GroupError(f"rank {peer} could not allocate")
        return self._runtime.open(bytes.fromhex(handle))

    def unmap(self) -> None:
        """Let go of the others' memory, once what runs on the device has ended. Idempotent."""
        self._runtime.call("cudaDeviceSynchronize")
        for peer in [peer for peer in self._addresses if peer != self._rank]:
            self._runtime.close(self._addresses.pop(peer))

    def free(self) -> None:
        """Give the own memory back; all ranks have called :meth:`unmap`. Idempotent."""
        own = self._addresses.pop(self._rank, 0)
        if own:
            self._runtime.free(own)
