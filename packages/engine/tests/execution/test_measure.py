"""Peak memory, as the process sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_engine.execution.cache import bind_cache
from headrace_engine.execution.measuring.measure import memory_meter

MIB = 1 << 20
METER = memory_meter(torch.device("cpu"))


@pytest.mark.req("REL-23")
def test_the_peak_of_a_block_counts_what_was_freed_in_it() -> None:
    with METER.peak() as peak:
        torch.ones(64 * MIB, dtype=torch.uint8)
    assert peak.bytes == pytest.approx(64 * MIB, rel=0.1)


def test_memory_freed_before_does_not_hide_the_peak() -> None:
    """Small tensors come from the heap, which keeps what is freed unless it is trimmed."""
    pieces = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1024)]
    last = torch.ones(64 << 10, dtype=torch.uint8)
    del pieces
    with METER.peak() as peak:
        again = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1024)]
    assert peak.bytes >= 0.7 * 64 * MIB
    assert len(again) == 1024
    assert last.sum() == 64 << 10


def test_a_cache_takes_memory_only_where_it_is_used(tiny: Any) -> None:
    model = tiny.LM()
    spec = FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, "float32")
    config = KVCacheConfig((1_000_000,), (KVCacheGroup(("layers.0", "layers.1"), spec),))
    before = METER.used()
    bind_cache(model.attention_layers(), {}, config, torch.device("cpu"))
    assert config.num_bytes > 400 * MIB
    assert METER.used() - before < 40 * MIB
