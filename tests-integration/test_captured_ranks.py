"""Steps of two processes that talk through shared memory are recorded with what they say to each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from captured_ranks import capture_of_a_barrier, eager_and_replayed, replayed_until_alone

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
