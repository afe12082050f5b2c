"""Settings of two engines that share experts."""

from __future__ import annotations

from typing import Any

SHARED: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 7,
}
