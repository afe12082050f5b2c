"""Random weights for any model, the same for the same seed: to measure and test without files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headrace_models.loading.mapping import Wanted


def dummy_tensors(
    wanted: Iterable[Wanted], dtype: str, seed: int
) -> Iterator[tuple[str, Tensor, Path]]:
    """One tensor for each expected one; a tensor's values depend on its name and the seed only."""
    origin = Path("(dummy weights)")
    for tensor in wanted:
        digest = hashlib.sha256(f"{seed}:{tensor.source}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        kind = getattr(torch, tensor.dtype or dtype)
        yield tensor.source, _random(tensor, kind, generator), origin


def _random(tensor: Wanted, kind: torch.dtype, generator: torch.Generator) -> Tensor:
    if not kind.is_floating_point:
        info = torch.iinfo(kind)
        # Bytes may be those of float16 scales: larger ones would be large numbers, or none.
        low, high = max(info.min, -127), 15 if kind == torch.uint8 else min(info.max, 127)
        return torch.randint(low, high + 1, tensor.shape, generator=generator).to(kind)
    if "scale" in tensor.source.rpartition(".")[2]:
        return torch.full(tensor.shape, 1e-3, dtype=kind)
    if len(tensor.shape) < 2:
        value = 0.0 if tensor.source.endswith("bias") else 1.0
        return torch.full(tensor.shape, value, dtype=kind)
    return (torch.randn(tensor.shape, generator=generator) * 0.02).to(kind)
