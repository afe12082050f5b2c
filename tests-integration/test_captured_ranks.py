"""Steps of two processes that talk through shared memory are recorded with what they say to each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stage_parts
from captured_ranks import capture_of_a_barrier, eager_and_replayed, replayed_until_alone
from families import save_model

from headrace_distributed.rendezvous import RendezvousServer
from headrace_distributed.shm import library as shared_memory
from headrace_kernels.cpu import library as kernels
from headrace_testing.engine.communicators import same_bits
from headrace_testing.engine.rank_processes import RankProcesses

pytestmark = pytest.mark.skipif(
    kernels.path() is None or not shared_memory.available(),
    reason="the native libraries were not built",
)


@pytest.fixture
def ranks() -> Iterator[RankProcesses]:
    with RendezvousServer() as server, RankProcesses("shm", 2, server.address("tp")) as found:
        yield found


def test_eager_and_captured_steps_give_the_same_bits(ranks: RankProcesses) -> None:
    for dtype in ("float32", "bfloat16"):
        first, second = ranks.on_every_rank(eager_and_replayed, dtype)
        for (eager, replayed, caches), (other_eager, other_replayed, other_caches) in zip(
            first, second, strict=True
        ):
            assert same_bits(eager, replayed)
            assert same_bits(eager, other_eager)
            assert same_bits(eager, other_replayed)
            assert caches
            assert other_caches
            width = eager.shape[1] // 2  # each rank has brought its part
            assert not same_bits(eager[:, :width], eager[:, width:])


def test_parts_of_stages_give_the_same_bits_recorded(ranks: RankProcesses, tmp_path: Path) -> None:
    """Each process records its own layers, and what it says to the other one."""
    save_model("llama", tmp_path)
    first, second = ranks.on_every_rank(stage_parts.eager_and_replayed, str(tmp_path))
    eager, replayed, num_calls = first
    assert len(eager) == len(replayed) == len(stage_parts.STEPS)
    assert all(same_bits(*pair) for pair in zip(eager, replayed, strict=True))
    assert min(num_calls, second[2]) > 10


def test_a_rank_that_dies_within_captured_steps_is_named(ranks: RankProcesses) -> None:
    ranks.begin(0, replayed_until_alone)
    ranks.kill(1)
    first, second = ranks.answer(0)
    assert "all_" in first
    assert second.startswith("PeerLost: all_reduce: rank 1 (pid ")
    assert second.endswith("has died")


def test_a_barrier_refuses_the_capture(ranks: RankProcesses) -> None:
    said = ranks.on_every_rank(capture_of_a_barrier)
    assert said == ["CaptureRefused: a barrier between ranks"] * 2
