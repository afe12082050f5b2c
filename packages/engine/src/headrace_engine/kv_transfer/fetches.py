"""Requests that wait while a connector brings their blocks near, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from headrace_engine.kv_transfer.rank_blocks import Blocks


class FetchesBlocks(Protocol):
    """Brings blocks near."""

    def fetch(self, request_id: str, blocks: Blocks, params: Mapping[str, Any]) -> bool:
        """True: ask again, they are on their way."""
        ...

    def forget(self, request_id: str) -> None:
        """Nothing need be fetched for a request any more."""
        ...


class BlockFetches:
    """The fetches of one engine. Used from the scheduler's thread.

    Args:
        connector: fetches, on all ranks.
    """

    def __init__(self, connector: FetchesBlocks) -> None:
        self._connector = connector
        self._under_way: dict[str, Blocks] = {}
        """By request: what is on its way."""
        self._done: set[str] = set()
        """Requests in the queue for which everything that could be had has been fetched."""

    def waits(
        self, request_id: str, params: Mapping[str, Any], wanted: Callable[[], Blocks]
    ) -> bool:
        """True if a request should wait; a fetch begins here, once for each time that it is in the queue.

        Args:
            params: its ``kv_transfer_params``.
            wanted: says what it needs that is not here.
        """
        if request_id in self._done:
            return False
        blocks = self._under_way.get(request_id)
        if blocks is None:
            blocks = wanted()
            if any(not blocks.keys().isdisjoint(other) for other in self._under_way.values()):
                return True  # another request fetches the same prefix
        if blocks and self._connector.fetch(request_id, blocks, params):
            self._under_way[request_id] = blocks
            return True
        self._under_way.pop(request_id, None)
        self._done.add(request_id)
        return False

    def is_done(self, request_id: str) -> bool:
        """True if a fetch for it has ended."""
        return request_id in self._done

    def forget(self, request_id: str) -> None:
        """A request has left the queue."""
        self._done.discard(request_id)
        if self._under_way.pop(request_id, None) is not None:
            self._connector.forget(request_id)
