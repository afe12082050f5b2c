"""A rank that follows, asked by rank 0 for its parts of blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_engine.kv_transfer.rank_blocks import Blocks, RankBlocks


class BlockFinder:
    """Looks for blocks, and has them fetched, one question after the other.

    Args:
        own: the rank's.
    """

    def __init__(self, own: RankBlocks) -> None:
        self._own = own
        self._fetched: set[str] = set()
        """Requests whose fetch has ended, while other ranks' go on."""

    def find(
        self, request_id: str, blocks: Blocks, params: Mapping[str, Any]
    ) -> list[bytes] | None:
        """Keys of the blocks of which the rank has its parts; None: ask again, some are on their way."""
        if request_id not in self._fetched:
            if self._own.fetch(request_id, blocks, params):
                return None
            self._fetched.add(request_id)
        return [key for key, group in blocks.items() if self._own.contains(key, group)]

    def forget(self, request_id: str) -> None:
        """A request waits no longer."""
        self._fetched.discard(request_id)
        self._own.forget(request_id)
