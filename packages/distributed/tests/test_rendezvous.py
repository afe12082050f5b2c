from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace_distributed.errors import PeerLost
from headrace_distributed.rendezvous import RendezvousServer, connect, exchange

PATIENCE = 60.0


def test_who_waits_is_told_when_the_meeting_is_given_up() -> None:
    """Rank 1 has died before it joined: rank 0 need not wait for the whole timeout."""
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


def test_what_comes_late_is_found() -> None:
    with RendezvousServer() as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(
            lambda: exchange(connect(server.address("tp")), "cores", 0, 2, "0-3", PATIENCE)
        )
        second = exchange(connect(server.address("tp")), "cores", 1, 2, "4-7", PATIENCE)
        assert first.result(PATIENCE) == second == ("0-3", "4-7")
