"""The worker's thread keeps to its cores."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_engine.execution.binding import ThreadBinding

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


def _affinity() -> set[int]:
    return os.sched_getaffinity(0)


def _of_a_new_thread() -> set[int]:
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(_affinity()))
    thread.start()
    thread.join()
    return seen[0]


def test_a_thread_is_bound_and_released() -> None:
    usable = sorted(_affinity())
    cores = (usable[-1], usable[0]) if len(usable) > 1 else tuple(usable)

    def life() -> None:
        binding = ThreadBinding(cores)
        binding.enter()
        assert _affinity() == _of_a_new_thread() == set(cores)
        binding.narrow()
        assert _affinity() == {cores[0]}
        binding.widen()
        assert _affinity() == _of_a_new_thread() == set(cores)
        binding.leave()
        binding.leave()
        assert _affinity() == set(usable)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(life).result()
    assert _affinity() == set(usable)


def test_no_cores_bind_nothing() -> None:
    before = _affinity()
    binding = ThreadBinding(())
    binding.enter()
    binding.narrow()
    binding.widen()
    assert _affinity() == before
    binding.leave()
