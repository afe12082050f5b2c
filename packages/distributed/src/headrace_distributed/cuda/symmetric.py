"""All-reduce by torch's symmetric memory: the library's own kernels, over buffers that all ranks map.

torch exchanges the buffers' handles itself, on a store that it is given, under a name of ours: no process
group is registered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace_core.errors import MissingDependency
from headrace_distributed.cuda.joining import GpuRanks
from headrace_distributed.errors import GroupError

DTYPE = torch.bfloat16


class SymmetricAllReduce:
    """A buffer of each rank that all have mapped; a collective to make.

    Args:
        ranks: they have met.
        num_bytes: of the largest tensor, which each rank holds once.
        name: of the group, for torch.
        memory: torch's ``_SymmetricMemory``, or what takes its place.

    Raises:
        MissingDependency: torch has no symmetric memory.
        GroupError: the buffers cannot be mapped.
    """

    def __init__(self, ranks: GpuRanks, num_bytes: int, name: str, memory: Any = None) -> None:
        memory = torch_memory() if memory is None else memory
        self._name = name
        try:
            memory.set_group_info(name, ranks.rank, ranks.world_size, ranks.store)
            size = num_bytes // DTYPE.itemsize
            self._buffer: Tensor = memory.empty_strided_p2p(
                (size,), (1,), DTYPE, ranks.device, name
            )
            # Held: it is what keeps the others' buffers mapped.
            self._handle = memory.rendezvous(self._buffer, name)
        except RuntimeError as error:
            raise GroupError(f"symmetric memory: {error}") from error

    @property
    def has_multicast(self) -> bool:
        """True if the switch can add up (NVLS)."""
        return bool(self._handle is not None and self._handle.multicast_ptr)

    def all_reduce(self, tensor: Tensor, *, multimem: bool) -> Tensor:
        """The sum over ranks, in new memory; partial sums are rounded to bfloat16.

        Raises:
            ValueError: the tensor is larger than the buffer, or not of bfloat16.
        """
        if tensor.dtype != DTYPE or tensor.nbytes > self._buffer.nbytes:
            raise ValueError(
                f"all_reduce: {tensor.nbytes} bytes of {tensor.dtype}: must be at most "
                f"{self._buffer.nbytes} of bfloat16"
            )
        own = self._buffer[: tensor.numel()]
        own.copy_(tensor.reshape(-1))
        ops = torch.ops.symm_mem
        (ops.multimem_all_reduce_ if multimem else ops.two_shot_all_reduce_)(own, "sum", self._name)
        return own.clone().view(tensor.shape)

    def close(self) -> None:
        """Let go of the buffers."""
        self._handle = None
        self._buffer = self._buffer[:0].clone()


def torch_memory() -> Any:
    """torch's ``_SymmetricMemory``.

    Raises:
        MissingDependency: it has none.
    """
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        raise MissingDependency(
            "torch with symmetric memory",
            needed_for="communicator 'symm_mem'",
            install="pip install 'torch>=2.11'",
        ) from None
    return _SymmetricMemory
