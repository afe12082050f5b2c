"""Tables of recurrent layers: where a request's state goes next, and which states stay.

A request has one state, in one block, that moves on from entry to entry of its table. Where it comes
by the end of a block of tokens it may leave that block behind as a *snapshot*, which is registered
under the digest of all tokens before it and found like a block of keys and values, and go on in
another. A snapshot is given only blocks that nobody else needs now, is referenced only while a step
begins from it, and is evicted like any cached block.

Every prompt's snapshots stay. Of those that a request leaves while it generates only the latest
does: generation comes by a boundary every few steps, and would soon have evicted all others'.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace_core.kv import NULL_BLOCK, KVCacheConfig, RecurrentSpec
from headrace_engine.kv.block_pool import BlockPool
from headrace_engine.kv.request_blocks import RequestBlocks


def state_groups(config: KVCacheConfig) -> list[int]:
    """Groups of recurrent layers, whose blocks hold a state each."""
    return [g for g, group in enumerate(config.groups) if isinstance(group.spec, RecurrentSpec)]


class StateTables:
    """The groups of recurrent layers of one model.

    Args:
        pools: by group.
        block_size: tokens per entry of a table.
    """

    def __init__(self, pools: Mapping[int, BlockPool], block_size: int) -> None:
        self.groups = tuple(pools)
        self._pools = pools
        self._block_size = block_size

    def at_boundary(self, entry: RequestBlocks, computed: int) -> bool:
        """True if the state after ``computed`` tokens is there, whole blocks of known ones."""
        count, rest = divmod(computed, self._block_size)
        return (
            not rest
            and 0 < computed <= len(entry.sequence.all_token_ids)
            and all(len(entry.tables[group]) == count for group in self.groups)
        )

    def is_new(self, digest: bytes) -> bool:
        """True if no snapshot of all groups is registered under this digest."""
        return any(self._pools[group].lookup(group, digest) is None for group in self.groups)

    def keep(self, entry: RequestBlocks, group: int, computed: int, digest: bytes) -> bool:
        """Register the state after ``computed`` tokens, which ``entry`` holds; True if it was not."""
        pool, block_id = self._pools[group], entry.tables[group][-1]
        is_new = pool.register(block_id, group, digest)
        if computed > entry.num_given:
            older = entry.decoded_states.get(group)
            if older is not None:
                pool.discard(*older)
            entry.decoded_states[group] = (block_id, digest)
        return is_new

    def move(self, entry: RequestBlocks, group: int, width: int) -> int:
        """The block in which the state goes on, ``width`` entries later; its entry becomes null."""
        table = entry.tables[group]
        index = len(table) - 1
        block_id, table[index] = table[index], NULL_BLOCK
        if entry.first_held[group] == index:
            entry.first_held[group] = index + width
        return block_id

    def is_settled(self, entry: RequestBlocks) -> bool:
        """True if nothing is held but the state itself."""
        return all(entry.first_held[g] >= len(entry.tables[g]) - 1 for g in self.groups)
