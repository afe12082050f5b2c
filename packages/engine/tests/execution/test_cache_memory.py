"""The cache's memory is the system's, before its use and after."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import pytest
import torch

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_engine import freed_memory
from headrace_engine.execution.cache import bind_cache, unbind
from headrace_engine.execution.measuring.measure import resident_bytes

MIB = 1 << 20


def config(tiny: Any, num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, "float32")
    return KVCacheConfig((num_blocks,), (KVCacheGroup(("layers.0", "layers.1"), spec),))


@pytest.fixture
def keeping_heaps() -> None:
    """As in a process that has read a checkpoint: the C library keeps blocks up to 32 MiB, and 64 MiB of
    free memory at each heap's end (mallopt(3))."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-3, 32 * MIB)
    mallopt(-1, 64 * MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_cache_that_is_let_go_is_the_systems(tiny: Any, keeping_heaps: None) -> None:
    """Also of a thread whose heap in the C library goes on: such a heap kept the end that was free."""
    fell = []

    def work() -> None:
        small = [torch.empty(1000) for _ in range(100)]  # what keeps the heap
        model, size = tiny.LM(), 5 * MIB
        cache = config(tiny, size // FullAttentionSpec(tiny.BLOCK_SIZE, 2, 4, "float32").page_bytes)
        caches = []
        for _ in range(5):
            caches += bind_cache(model.attention_layers(), {}, cache, torch.device("cpu"))
        for buffers in caches:
            for buffer in buffers:
                buffer.fill_(1)
        before = resident_bytes()
        unbind(model.attention_layers(), {})
        caches.clear()
        del buffer, buffers
        freed_memory.trim()
        fell.append(before - resident_bytes())
        assert small

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert fell[0] > 49 * MIB


def test_a_cache_that_the_system_refuses_is_a_memory_error(tiny: Any) -> None:
    layers = tiny.LM().attention_layers()
    for num_blocks in (1 << 45, 1 << 60):
        with pytest.raises(MemoryError, match="bytes"):
            bind_cache(layers, {}, config(tiny, num_blocks), torch.device("cpu"))
