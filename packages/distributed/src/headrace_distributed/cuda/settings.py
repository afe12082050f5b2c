"""What communicators of GPUs read from the environment."""

from __future__ import annotations

import os


def fixed_order() -> bool:
    """True if sums are to be taken in the order of ranks: ``HEADRACE_BATCH_INVARIANT=1``.

    NCCL's own sums depend on where in a tensor a row lies, and partial sums of 16-bit floats are rounded;
    all ranks do get the same bits. The order of ranks costs each rank world_size times the bytes of small
    tensors, and sums by torch.
    """
    return os.environ.get("HEADRACE_BATCH_INVARIANT") == "1"
