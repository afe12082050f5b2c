"""All blocks of one pool, who references them, and which may be handed out next.

A block is in exactly one of three states: *referenced* (count above zero, maybe cached as well);
*free and cached* (its content can still be found by digest); *free and empty*. Free blocks form one
doubly linked list whose links lie in two arrays indexed by block id, so that every operation is
O(1) and makes no objects. Empty blocks enter at its head and cached ones at its tail: taking from
the head therefore uses empty blocks first and then evicts the least recently used cached one.

A digest names at most one block per group. A second block of equal content stays uncached while
the first is there (so it never displaces other content once free); :meth:`BlockPool.register` may
be called again when it is released, which makes it findable if the first has been evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace_core.kv import NULL_BLOCK


class BlockPool:
    """Reference counts, the free list and the digest map of ``num_blocks`` blocks.

    Args:
        num_blocks: blocks in the pool, the null block (id 0, never handed out) included.
        num_groups: cache groups of the model; digests are looked up per group.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self.given_up: list[tuple[int, int, bytes]] | None = None
        """Block, group and digest of cached blocks that were handed out again; None: nobody asks."""
        self._digests: list[bytes | None] = [None] * num_blocks
        self._group_of = [0] * num_blocks
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self.on_forgotten: Callable[[bytes], None] | None = None
        """Called with the digest of content that can no longer be found; not by :meth:`clear_cached`."""
        # Index 0 is the null block, which is never free: it serves as the list's two ends.
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by digest, referenced or free."""
        return sum(map(len, self._cached))

    def lookup(self, group: int, digest: bytes) -> int | None:
        """The block of that content, or None."""
        return self._cached[group].get(digest)

    def found(self, group: int, digest: bytes) -> int:
        """The block that :meth:`lookup` has found before. KeyError if it is gone."""
        return self._cached[group][digest]

    def found_prefix(self, group: int, digests: Iterable[bytes]) -> list[int]:
        """The blocks of these contents, up to the first that is not here."""
        find, found = self._cached[group].get, list[int]()
        for digest in digests:
            block_id = find(digest)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def register(self, block_id: int, group: int, digest: bytes) -> bool:
        """Make a referenced block findable, unless it or one of equal content already is.

        Returns:
            True if it has become so now.
        """
        if self._digests[block_id] is not None or digest in self._cached[group]:
            return False
        self._cached[group][digest] = block_id
        self._digests[block_id] = digest
        self._group_of[block_id] = group
        return True

    def digest_of(self, block_id: int) -> bytes | None:
        """The digest under which the block is cached, if it is."""
        return self._digests[block_id]

    def take(self, count: int) -> list[int]:
        """Reference ``count`` blocks from the free list's head; the caller checked ``num_free``."""
        taken: list[int] = []
        following = self._next
        for _ in range(count):
            block_id = following[0]
            following[0] = after = following[block_id]
            self._prev[after] = 0
            digest = self._digests[block_id]
            if digest is not None:
                if self.given_up is not None:
                    self.given_up.append((block_id, self._group_of[block_id], digest))
                self._forget(block_id)
            self.ref_counts[block_id] = 1
            taken.append(block_id)
        self.num_free -= count
        return taken

    def take_one(self) -> int:
        """:meth:`take` a single block."""
        following = self._next
        block_id: int = following[0]
        if self._digests[block_id] is not None:
            return self.take(1)[0]
        following[0] = after = following[block_id]
        self._prev[after] = 0
        self.ref_counts[block_id] = 1
        self.num_free -= 1
        return block_id

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each (found by :meth:`lookup`); null blocks are passed over."""
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self.ref_counts[block_id] == 0:
                self._unlink(block_id)
            self.ref_counts[block_id] += 1

    def register_each(
        self, block_ids: Iterable[int], group: int, digests: Iterable[bytes]
    ) -> list[int]:
        """:meth:`register` blocks one after another; null blocks are passed over.

        Returns:
            Places in ``block_ids`` of those that have become findable now.
        """
        own, group_of, cached = self._digests, self._group_of, self._cached[group]
        found = list[int]()
        for place, (block_id, digest) in enumerate(zip(block_ids, digests)):
            if own[block_id] is None and block_id != NULL_BLOCK and digest not in cached:
                cached[digest] = block_id
                own[block_id] = digest
                group_of[block_id] = group
                found.append(place)
        return found

    def release(self, block_id: int) -> None:
        """Drop one reference; the null block is passed over."""
        if block_id == NULL_BLOCK:
            return
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            if self._digests[block_id] is None:
                self._link(block_id, 0, self._next[0])
            else:
                self._link(block_id, self._prev[0], 0)

    def release_each(self, block_ids: Iterable[int]) -> None:
        """:meth:`release` blocks one after another: all of a request that ends."""
        counts, digests, following, before = self.ref_counts, self._digests, self._next, self._prev
        num_freed = 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            counts[block_id] = count = counts[block_id] - 1
            if count:
                continue
            num_freed += 1
            if digests[block_id] is None:  # between the head, which is 0, and the first
                before[block_id], following[block_id] = 0, following[0]
                following[0] = before[following[block_id]] = block_id
            else:  # between the last and the tail, which is 0
                before[block_id], following[block_id] = before[0], 0
                following[before[block_id]] = before[0] = block_id
        self.num_free += num_freed

    def discard(self, block_id: int, digest: bytes) -> None:
        """Forget the content of a free block, which is taken next then. Nothing happens if it holds
        something else by now, or is referenced."""
        if self.ref_counts[block_id] == 0 and self._digests[block_id] == digest:
            self._unlink(block_id)
            self._forget(block_id)
            self._link(block_id, 0, self._next[0])

    def clear_cached(self) -> None:
        """Forget every digest."""
        for cached in self._cached:
            for block_id in cached.values():
                self._digests[block_id] = None
            cached.clear()

    def free_blocks(self) -> list[int]:
        """Free blocks in the order in which they would be taken."""
        order: list[int] = []
        block_id = self._next[0]
        while block_id != NULL_BLOCK:
            order.append(block_id)
            block_id = self._next[block_id]
        return order

    def _forget(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is not None:
            del self._cached[self._group_of[block_id]][digest]
            self._digests[block_id] = None
            if self.on_forgotten is not None:
                self.on_forgotten(digest)

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, block_id: int, before: int, after: int) -> None:
        self._prev[block_id], self._next[block_id] = before, after
        self._next[before] = self._prev[after] = block_id
        self.num_free += 1
