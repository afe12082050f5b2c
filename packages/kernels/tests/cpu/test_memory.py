"""Memory for packed weights."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from headrace_kernels.cpu.memory import HUGE_PAGE, packed_buffer


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 17])
def test_a_buffer_has_the_bytes_asked_for_and_takes_writes(num_bytes: int) -> None:
    buffer = packed_buffer(num_bytes)
    assert buffer.dtype is torch.uint8
    assert buffer.shape == (num_bytes,)
    buffer.fill_(7)
    assert int(buffer.long().sum()) == 7 * num_bytes


def test_large_buffers_begin_at_a_large_page() -> None:
    assert packed_buffer(2 * HUGE_PAGE).data_ptr() % HUGE_PAGE == 0


def test_memory_goes_back_with_the_last_tensor() -> None:
    buffer = packed_buffer(HUGE_PAGE)
    storage = weakref.ref(buffer.untyped_storage())
    view = buffer[10:20]
    del buffer
    gc.collect()
    view.fill_(1)
    del view
    gc.collect()
    assert storage() is None
