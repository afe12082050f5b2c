from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_distributed.errors import PeerLost
from headrace_distributed.rendezvous import RendezvousServer, connect, exchange

PATIENCE = 60.0


def test_who_waits_is_told_when_the_store_closes() -> None:
    server = RendezvousServer()
    has_begun = threading.Event()

    def join() -> None:
        store = connect(server.address("tp"), PATIENCE)
        has_begun.set()
        exchange(store, "process", 0, 2, "me", timeout=10 * PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        assert has_begun.wait(PATIENCE)
        server.close()
        with pytest.raises(PeerLost, match="rendezvous closed before rank"):
            joining.result(PATIENCE)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_meeting_that_was_given_up_ends_waits(when: str) -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(1) as pool:
        address = server.address("tp")
        if when == "before":  # the rank has not even connected
            server.give_up()
        joining = pool.submit(
            lambda: exchange(connect(address), "process", 0, 2, "me", timeout=10 * PATIENCE)
        )
        if when == "after":
            server.give_up()
        with pytest.raises(PeerLost, match="given up before rank 1 of 2 joined"):
            joining.result(PATIENCE)


def test_what_comes_late_is_found() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            lambda: exchange(connect(server.address("tp")), "cores", 0, 2, "0-3", PATIENCE)
        )
        second = exchange(connect(server.address("tp")), "cores", 1, 2, "4-7", PATIENCE)
        assert first.result(PATIENCE) == second == ("0-3", "4-7")
