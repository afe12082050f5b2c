"""Events of the prefix cache: the blocks that can be found, as they come and go.

The form is the field's (vLLM's ``kv_events``), so that routers written for it can listen: msgpack arrays,
each event named by its first element, defaults at the end left out::

    batch  = [seconds, [event, ...], data-parallel rank or nil]
    stored = ["BlockStored", [hash, ...], parent or nil, [token id, ...], block size, adapter or nil, medium]
    gone   = ["BlockRemoved", [hash, ...], medium]
    none   = ["AllBlocksCleared"]

A hash is the block's digest (:mod:`headrace_engine.kv.hashing`), 32 bytes. It covers everything that the
block depends on, so a set of hashes says exactly what is cached. A model with several groups of layers has a
block of each group under one hash: it is stored as the first comes, and gone when the last has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

MEDIUM = "GPU"
"""The name that the field gives to the engine's own pool, whatever device holds it."""

Hash = int | bytes
"""Name of a block: headrace sends the digest; other publishers send numbers of 64 bits."""


class BlockStored(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="BlockStored"
):
    """Blocks that can be found from now on, one after the other in their sequence."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    """Block before the first of them; None: they begin a sequence."""
    token_ids: list[int]
    """Tokens of all these blocks."""
    block_size: int
    """Tokens a block."""
    lora_id: int | str | None = None
    """Adapter that computed them: its content's digest, other publishers' number; None: none did."""
    medium: str | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.parent_block_hash, tuple(self.token_ids),
                     self.block_size, self.lora_id, self.medium))  # fmt: skip


class BlockRemoved(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="BlockRemoved"
):
    """Blocks that cannot be found any more."""

    block_hashes: list[Hash]
    medium: str | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium))


class AllBlocksCleared(
    msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag="AllBlocksCleared"
):
    """No block can be found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Events of one step, in their order."""

    ts: float
    """Seconds since the epoch."""
    events: list[Event]
    data_parallel_rank: int | None = None


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def encode(batch: KVEventBatch) -> bytes:
    """The batch as msgpack."""
    return _ENCODER.encode(batch)


def decode(payload: bytes) -> KVEventBatch:
    """The batch of :func:`encode`.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _DECODER.decode(payload)


class BlockEventLog:
    """Events since they were last taken. A KV manager writes them, if somebody wants them.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._holders: Counter[bytes] = Counter()
        """Groups of layers that hold a block of the digest."""
        self._events: list[Event] = []

    def stored(
        self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], adapter: str
    ) -> None:
        """A block of one group can be found.

        Args:
            digest: of the block.
            parent: of the block before; None: it is a sequence's first.
            token_ids: the block's.
            adapter: digest of what computed it; "": no adapter.
        """
        self._holders[digest] += 1
        if self._holders[digest] > 1:
            return
        last = self._events[-1] if self._events else None
        lora = adapter or None
        if (
            isinstance(last, BlockStored)
            and last.block_hashes[-1] == parent
            and last.lora_id == lora
        ):
            last.block_hashes.append(digest)
            last.token_ids.extend(token_ids)
            return
        self._events.append(
            BlockStored([digest], parent, list(token_ids), self._block_size, lora, MEDIUM)
        )

    def removed(self, digest: bytes) -> None:
        """A block of one group cannot be found any more."""
        self._holders[digest] -= 1
        if self._holders[digest] > 0:
            return
        del self._holders[digest]
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(digest)
        else:
            self._events.append(BlockRemoved([digest], MEDIUM))

    def cleared(self) -> None:
        """No block of any group can be found any more."""
        self._holders.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[Event]:
        """The events, and forget them."""
        events, self._events = self._events, []
        return events


class CachedBlocks:
    """The blocks that an engine has cached, rebuilt from its events.

    Chains are followed by token ids, so whoever has a prompt's ids can ask how much of it is cached.
    """

    def __init__(self) -> None:
        self._keys: dict[Hash, tuple[Any, ...]] = {}
        self._next: dict[tuple[Any, ...], Hash] = {}
        self.block_size = 0
        """Tokens a block; 0: no event has said it."""

    @property
    def hashes(self) -> frozenset[Hash]:
        """Hashes of all blocks."""
        return frozenset(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def apply(self, batch: KVEventBatch) -> None:
        """Take a batch's events in. One that repeats what is known changes nothing."""
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    for block in event.block_hashes:
                        self._remove(block)
                case AllBlocksCleared():
                    self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._keys.clear()
        self._next.clear()

    def num_cached_tokens(self, token_ids: Sequence[int], adapter: int | str | None = None) -> int:
        """Tokens of the longest cached prefix of a prompt, whole blocks.

        Args:
            token_ids: of the prompt.
            adapter: as :attr:`BlockStored.lora_id`.
        """
        size = self.block_size
        if not size:
            return 0
        parent: Hash | None = None
        for start in range(0, len(token_ids) - size + 1, size):
            found = self._next.get((parent, adapter, tuple(token_ids[start : start + size])))
            if found is None:
                return start
            parent = found
        return len(token_ids) // size * size

    def _store(self, event: BlockStored) -> None:
        size = self.block_size = event.block_size
        parent = event.parent_block_hash
        for index, block in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            key = (parent, event.lora_id, tokens)
            self._keys[block] = key
            self._next[key] = block
            parent = block

    def _remove(self, block: Hash) -> None:
        key = self._keys.pop(block, None)
        # Prompts with different salts have equal tokens and different blocks; one of them is followed.
        if key is not None and self._next.get(key) == block:
            del self._next[key]
