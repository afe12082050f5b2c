"""One rank's parts of blocks at its connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.kv import KVConnector
from headrace_engine.kv_transfer.parts import GroupParts

Blocks = Mapping[bytes, int]
"""Key of a block -> its cache group."""


class RankBlocks:
    """Says what the connector of a rank has. One thread, beside the one that moves blocks.

    Args:
        parts: by cache group, those of the rank.
        sizes: by cache group, bytes of the rank's part of a block, all of its parts together.
    """

    def __init__(
        self, connector: KVConnector, parts: Sequence[GroupParts], sizes: Sequence[int]
    ) -> None:
        self._connector, self._parts, self._sizes = connector, parts, sizes

    def contains(self, key: bytes, group: int) -> bool:
        """True if all of the rank's parts of a block are there."""
        return all(map(self._connector.contains, self._parts[group].keys(key)))

    def fetch(self, request_id: str, blocks: Blocks, params: Mapping[str, Any]) -> bool:
        """See :meth:`KVConnector.fetch`; blocks that are there may be among them."""
        wanted = {}
        for key, group in blocks.items():
            parts = self._parts[group]
            for part in parts.keys(key):
                if not self._connector.contains(part):
                    wanted[part] = self._sizes[group] // parts.here
        return self._connector.fetch(request_id, wanted, params) if wanted else False

    def forget(self, request_id: str) -> None:
        """See :meth:`KVConnector.forget`."""
        self._connector.forget(request_id)

    def address(self) -> Mapping[str, Any]:
        """See :meth:`KVConnector.address`."""
        return self._connector.address()
