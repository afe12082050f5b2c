"""How fast this machine reads memory right now: what decoding is limited by."""

from __future__ import annotations

import time

_BYTES = 256 << 20
"""Beyond every cache."""
_SECONDS = 0.2


def read_speed() -> float:
    """Bytes a second that all threads of torch read, the best of some passes; takes about 0.3 s."""
    import torch

    memory = torch.zeros(_BYTES // 8, dtype=torch.int64)
    best, end = 0.0, time.perf_counter() + _SECONDS
    while True:
        start = time.perf_counter()
        memory.max()
        now = time.perf_counter()
        best = max(best, _BYTES / (now - start))
        if now >= end:
            return best
