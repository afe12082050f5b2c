"""Fetches for requests that wait: threads beside the engine's own, each request with a deadline."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace_distributed.kv_connectors.p2p.messages import Wanted
from headrace_distributed.kv_connectors.p2p.peer import Address, Engine, Peers
from headrace_distributed.kv_connectors.p2p.ranks import RankLayout
from headrace_distributed.kv_connectors.p2p.store import BlockStore, NoRoom

logger = logging.getLogger(__name__)

REST_SECONDS = 3.0
"""After a failure an engine is not asked for so long: requests do not wait for one that is away."""
MAX_WAITING = 1024
"""Fetches that wait for a thread; what comes on top is not fetched."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """One request's."""

    engines: Sequence[Engine]
    wanted: list[Wanted]
    deadline: float
    done: threading.Event = field(default_factory=threading.Event)


class Fetcher:
    """Brings blocks into a store.

    Args:
        store: where to.
        peers: where from.
        num_threads: fetches at the same time.
        seconds: that a request waits for its blocks at most.
        layout: of this rank.
    """

    def __init__(
        self,
        store: BlockStore,
        peers: Peers,
        num_threads: int,
        seconds: float,
        layout: RankLayout | None = None,
    ) -> None:
        self._store, self._peers, self._seconds = store, peers, seconds
        self._layout, self._warned_of_parts = layout or RankLayout(), False
        self._fetches: dict[str, _Fetch] = {}
        """By request. Used by the engine's own thread alone."""
        self._queue: queue.Queue[_Fetch | None] = queue.Queue(MAX_WAITING)
        self._rests: dict[Address, float] = {}
        self._warned: set[Address] = set()
        self._threads = [
            threading.Thread(target=self._work, name=f"headrace-kv-fetch-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def fetch(
        self,
        request_id: str,
        blocks: Mapping[bytes, int],
        engines: Sequence[Engine],
    ) -> bool:
        """Begin a request's fetch, or look after it: True while it goes on."""
        fetch = self._fetches.get(request_id)
        if fetch is None:
            wanted = [Wanted(*item) for item in blocks.items()]
            fetch = _Fetch(engines, wanted, time.monotonic() + self._seconds)
            try:
                self._queue.put_nowait(fetch)
            except queue.Full:
                return False
            self._fetches[request_id] = fetch
        if not fetch.done.is_set() and time.monotonic() < fetch.deadline:
            return True
        del self._fetches[request_id]
        return False

    def forget(self, request_id: str) -> None:
        """A request waits no longer."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is not None:
            fetch.deadline = 0.0  # read before each place

    def close(self) -> None:
        """End the threads, once what they fetch has come or failed. Idempotent."""
        for fetch in self._fetches.values():
            fetch.deadline = 0.0
        self._fetches.clear()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(self._seconds)
        self._threads = []
        self._peers.close()

    def _work(self) -> None:
        while (fetch := self._queue.get()) is not None:
            try:
                self._fetch(fetch)
            except Exception:
                logger.exception("KV transfer: a fetch failed")
            finally:
                fetch.done.set()

    def _fetch(self, fetch: _Fetch) -> None:
        for engine in fetch.engines:
            place, now = engine.address, time.monotonic()
            if not self._left(fetch) or now >= fetch.deadline:
                return
            if self._rests.get(place, 0.0) > now:
                continue
            try:
                self._fetch_from(engine, fetch)
                self._warned.discard(place)
            except NoRoom as error:
                logger.warning("KV transfer: blocks of a prompt were left out: %s", error)
                return
            except OSError as error:
                self._rests[place] = time.monotonic() + REST_SECONDS
                level = logging.DEBUG if place in self._warned else logging.WARNING
                self._warned.add(place)
                logger.log(level, "KV transfer: no blocks from %s: %s", place, error)

    def _fetch_from(self, engine: Engine, fetch: _Fetch) -> None:
        """Ask the engine's ranks, one after the other, for what is still missing."""
        came, there = 0, None
        for address in self._peers.ranks(engine, fetch.deadline):
            left = self._left(fetch)
            if not left:
                return
            came += self._peers.fetch(engine, address, left, self._store, fetch.deadline)
            there = self._peers.layout_at(address)
        if not came and there is not None and (why := self._layout.difference(there)):
            self._warn_of_parts(engine.address, why)

    def _warn_of_parts(self, place: Address, why: str) -> None:
        if not self._warned_of_parts:
            self._warned_of_parts = True
            logger.warning(
                "KV transfer: %s has no block that this engine asked for: %s", place, why
            )

    def _left(self, fetch: _Fetch) -> list[Wanted]:
        return [one for one in fetch.wanted if not self._store.contains(one.key)]
