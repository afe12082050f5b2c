"""The blocks of the cache that one request holds."""

from __future__ import annotations

from headrace_engine.kv.contract import CachedSequence
from headrace_engine.kv.hashing import BlockHashes


class RequestBlocks:
    """A request's block tables, and how far they were looked after.

    Args:
        sequence: the request.
        num_groups: cache groups.
    """

    __slots__ = (
        "decoded_states",
        "first_held",
        "hashes",
        "is_private",
        "no_allocation_until",
        "num_given",
        "num_registered",
        "sequence",
        "tables",
    )  # fmt: skip

    def __init__(self, sequence: CachedSequence, num_groups: int) -> None:
        self.sequence = sequence
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_given = len(sequence.all_token_ids)
        """Tokens that were known when it came, or came back."""
        self.hashes: BlockHashes | None = None
        """The request's digests, once a block has been registered; kept here, too, to be found at once."""
        self.num_registered = 0
        """Blocks, from the first, that were offered to the digest map."""
        self.no_allocation_until = 0
        """Growing to this many tokens changes nothing; 0 where windows may pass."""
        self.first_held = [0] * num_groups
        """By group: entries before this one are null."""
        self.is_private = False
        """Nothing in these blocks may be found by others: weights changed below it."""
        self.decoded_states: dict[int, tuple[int, bytes]] = {}
        """By group: block and digest of the latest snapshot among generated tokens."""
