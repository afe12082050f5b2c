"""The cache's memory is made resident ahead of its use."""

from __future__ import annotations

import mmap
import sys

import pytest
import torch
from torch import Tensor

from headrace_engine.execution.populate import WHOLE, CachePopulator, populated_bytes
from headrace_testing.waiting import wait_until

PAGE = mmap.PAGESIZE
NUM_BLOCKS = 64

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for memory")


def buffers(count: int = 2) -> list[Tensor]:
    """Untouched memory, one page for each block."""
    regions = (
        mmap.mmap(-1, NUM_BLOCKS * PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(count)
    )
    return [torch.frombuffer(region, dtype=torch.uint8) for region in regions]


def resident(buffer: Tensor) -> list[bool]:
    """Page by page, as the kernel's pagemap has it."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(buffer.data_ptr() // PAGE * 8)
        return [bool(pages.read(8)[7] & 0x80) for _ in range(NUM_BLOCKS)]


@linux
def test_as_much_as_asked_for_is_resident_and_follows_use() -> None:
    memory = buffers()
    populator = CachePopulator(memory, NUM_BLOCKS, 16 * PAGE)  # 8 blocks of both
    populator.start()
    try:
        wait_until(lambda: populator.num_populated == 8)
        for buffer in memory:
            assert resident(buffer) == [True] * 8 + [False] * (NUM_BLOCKS - 8)
        populator.used(3)  # half is left: that will do for now
        assert populator._target == 8
        populator.used(4)
        wait_until(lambda: populator.num_populated == 13)
        populator.used(20)
        wait_until(lambda: populator.num_populated == 29)
        assert all(all(resident(buffer)[:29]) for buffer in memory)
        populator.used(NUM_BLOCKS - 1)
        wait_until(lambda: populator.num_populated == NUM_BLOCKS)
    finally:
        populator.close()


@linux
def test_what_is_written_meanwhile_stays() -> None:
    memory = buffers(1)
    memory[0][:] = 7
    populator = CachePopulator(memory, NUM_BLOCKS, NUM_BLOCKS * PAGE)
    populator.start()
    try:
        wait_until(lambda: populator.num_populated == NUM_BLOCKS)
    finally:
        populator.close()
    assert bool((memory[0] == 7).all())


@linux
def test_a_whole_cache_is_resident_once_started() -> None:
    memory = buffers(3)
    populator = CachePopulator(memory, NUM_BLOCKS, WHOLE, num_threads=2)
    populator.start()
    try:
        assert populator.num_populated == NUM_BLOCKS
        assert all(all(resident(buffer)) for buffer in memory)
        populator.used(NUM_BLOCKS - 1)
    finally:
        populator.close()


def test_nothing_is_touched_if_nothing_is_wanted() -> None:
    populator = CachePopulator(buffers(), NUM_BLOCKS, 0)
    populator.start()
    populator.used(5)
    populator.close()
    populator.close()
    assert populator.num_populated == 0


@linux
def test_what_is_populated_is_counted_while_it_is_held() -> None:
    before = populated_bytes()
    populator = CachePopulator(buffers(), NUM_BLOCKS, 16 * PAGE)
    populator.start()
    wait_until(lambda: populator.num_populated == 8)
    assert populated_bytes() - before == 16 * PAGE
    populator.close()
    assert populated_bytes() == before
