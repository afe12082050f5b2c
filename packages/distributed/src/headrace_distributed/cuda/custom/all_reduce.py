"""All-reduce by our kernels: the host's side."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from headrace_core.errors import MissingDependency
from headrace_distributed.cuda.custom import protocol
from headrace_distributed.cuda.custom.cudart import CudaRuntime
from headrace_distributed.cuda.custom.memory import MappedMemory
from headrace_distributed.cuda.joining import GpuRanks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What is added up."""
BLOCK = 1024
"""Elements that a program takes at once: 16 bytes of a 16-bit type for each of 128 threads."""


class CustomAllReduce:
    """Kernels over memory that all ranks of a host have mapped; a collective to make.

    Operations follow each other, on one stream or on streams that wait for each other: the memory holds two.

    Args:
        ranks: they have met, on one host.
        slot_bytes: the largest tensor; each rank holds twice as many bytes.
        runtime: CUDA's.
        block: elements that a program takes at once, a power of two.

    Raises:
        MissingDependency: Triton is not installed.
        ValueError: there are too many ranks.
        GroupError: memory cannot be allocated or mapped.
    """

    def __init__(
        self, ranks: GpuRanks, slot_bytes: int, runtime: CudaRuntime, block: int = BLOCK
    ) -> None:
        check_triton()
        if not 2 <= ranks.world_size <= protocol.MOST_RANKS:
            raise ValueError(
                f"world_size = {ranks.world_size}: must be within 2 and {protocol.MOST_RANKS}"
            )
        self.slot_bytes = -(-slot_bytes // 256) * 256
        self._rank, self._world_size, self._block = ranks.rank, ranks.world_size, block
        self._memory = MappedMemory(ranks, protocol.num_bytes(self.slot_bytes), runtime)

    def all_reduce(self, tensor: Tensor, *, two_shot: bool) -> Tensor:
        """The sum over ranks, in new memory; every rank calls with the same shape, dtype and way.

        Raises:
            ValueError: the tensor is larger than a slot, or of a dtype that is not added up.
        """
        if tensor.dtype not in DTYPES or tensor.nbytes > self.slot_bytes:
            raise ValueError(
                f"all_reduce: {tensor.nbytes} bytes of {tensor.dtype}: must be at most {self.slot_bytes} "
                f"of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}"
            )
        own = tensor.contiguous()
        result = torch.empty_like(own)
        if own.numel():
            self._launch(own, result, two_shot)
        return result

    def _launch(self, own: Tensor, result: Tensor, two_shot: bool) -> None:
        # Imported here: triton takes a second, and decides at its import whether it interprets.
        from headrace_distributed.cuda.custom.kernels import one_shot_kernel, two_shot_kernel

        numel = own.numel()
        part = protocol.part_size(numel, self._world_size)
        grid = (protocol.num_programs(part if two_shot else numel, self._block),)
        parts = (part,) if two_shot else ()
        (two_shot_kernel if two_shot else one_shot_kernel)[grid](
            own, result, self._memory.addresses, self._rank, numel, *parts, self.slot_bytes,
            WORLD=self._world_size, LANES=1 << (self._world_size - 1).bit_length(), BLOCK=self._block,
            WIDEN=own.itemsize < 4, ROUND=_truncates(own), SLOTS_AT=protocol.SLOTS_AT,
            OPERATION_AT=protocol.OPERATION_AT, DONE_AT=protocol.DONE_AT,
        )  # fmt: skip

    def unmap(self) -> None:
        """Let go of the others' memory. Idempotent."""
        self._memory.unmap()

    def free(self) -> None:
        """Give the own memory back, once all ranks have called :meth:`unmap`. Idempotent."""
        self._memory.free()


def _truncates(tensor: Tensor) -> bool:
    """True if kernels must round: Triton's interpreter cuts float32 to bfloat16 (seen in 3.9), GPUs round."""
    return tensor.dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1"


def check_triton() -> None:
    """Check that Triton is installed.

    Raises:
        MissingDependency: it is not.
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        raise MissingDependency(
            "triton",
            needed_for="communicator 'custom'",
            install="pip install 'headrace-distributed[triton]'",
        ) from None
