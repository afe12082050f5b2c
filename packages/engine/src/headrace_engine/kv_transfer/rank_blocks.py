"""One rank's parts of blocks at its connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from headrace_core.kv import KVConnector

Blocks = Mapping[bytes, int]
"""Key of a block -> its cache group."""
PartSize = tuple[str, int]
"""Mark of a part of blocks, and its bytes."""


def part_key(key: bytes, mark: str) -> bytes:
    """Key of the part with this mark, of a block; "": the block's own."""
    return sha256(key + mark.encode()).digest() if mark else key


class RankBlocks:
    """Says what the connector of a rank has. One thread, beside the one that moves blocks.

    Args:
        parts: by cache group, those of the rank; a group may have none.
    """

    def __init__(self, connector: KVConnector, parts: Sequence[Sequence[PartSize]]) -> None:
        self._connector, self._parts = connector, parts

    def contains(self, key: bytes, group: int) -> bool:
        """True if all of the rank's parts of a block are there."""
        parts = self._parts[group]
        return all(self._connector.contains(part_key(key, mark)) for mark, _ in parts)

    def fetch(self, request_id: str, blocks: Blocks, params: Mapping[str, Any]) -> bool:
        """See :meth:`KVConnector.fetch`; blocks that are there may be among them."""
        wanted = {
            part: num_bytes
            for key, group in blocks.items()
            for mark, num_bytes in self._parts[group]
            if not self._connector.contains(part := part_key(key, mark))
        }
        return self._connector.fetch(request_id, wanted, params) if wanted else False

    def forget(self, request_id: str) -> None:
        """See :meth:`KVConnector.forget`."""
        self._connector.forget(request_id)

    def address(self) -> Mapping[str, Any]:
        """See :meth:`KVConnector.address`."""
        return self._connector.address()
