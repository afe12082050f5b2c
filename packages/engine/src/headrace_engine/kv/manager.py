"""Paged KV cache for groups of full, sliding-window and cross-attention layers, from one pool.

The tables that grow with a request have the same length, ``ceil(tokens / block_size)``; in a
sliding-window group the entries that no later query can see are :data:`NULL_BLOCK`. A table of
cross-attention layers has ``ceil(encoder states / block_size)`` entries from the request's first
tokens to its end; its blocks are never hashed, so nobody shares them.

Only *known* tokens are hashed. A step may be scheduled before the previous one's tokens are known;
blocks filled by such placeholders are registered by a later :meth:`PagedKVCacheManager.allocate`
or by :meth:`PagedKVCacheManager.free`, once ``all_token_ids`` has caught up.

Freed blocks may be handed out at once although a step in flight still writes to them: steps are
executed in the order in which they were scheduled, so whoever receives the block writes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    NULL_BLOCK,
    BlockIds,
    CachedSequence,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    KVCacheStats,
    PrefixMatch,
    SlidingWindowSpec,
)
from headrace_engine.kv.block_pool import BlockPool
from headrace_engine.kv.hashing import BlockHashes


class PagedKVCacheManager(KVCacheManager):
    """See :class:`~headrace_core.kv.KVCacheManager`.

    Args:
        config: pool size and layer groups.
        enable_prefix_caching: False matches nothing and hashes nothing. Must be False with groups
            of cross-attention layers: equal tokens mean nothing where encoder states differ.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most tokens of one step. Known, it lets :meth:`fits` count for a
            sliding-window group only what one step can hold at a time; None counts every token.

    Raises:
        ConfigError: no groups, no usable block, unequal block sizes, or a kind of layer that this
            manager does not serve.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        enable_prefix_caching: bool,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
    ) -> None:
        _check_config(config, enable_prefix_caching)
        self.block_size = config.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_model_len = max_model_len
        self._max_step_tokens = max_num_batched_tokens or max_model_len
        self._windows = [_window(group.spec) for group in config.groups]
        self._sliding = [(g, w) for g, w in enumerate(self._windows) if w]
        self._is_cross = [isinstance(group.spec, CrossAttentionSpec) for group in config.groups]
        self._num_cross = sum(self._is_cross)
        self._growing = self._is_cross.index(False)
        """A group whose table grows with its request."""
        self._pool = BlockPool(config.num_blocks, len(config.groups))
        self._nothing: BlockIds = tuple([] for _ in self._windows)
        self._entries: dict[str, _Entry] = {}
        self._hashes: dict[str, BlockHashes] = {}
        self._queries = self._hits = 0

    def match_prefix(self, sequence: CachedSequence) -> PrefixMatch:
        if not self.enable_prefix_caching or sequence.skip_reading_prefix_cache:
            return PrefixMatch(0, tuple([] for _ in self._windows))
        digests = self._digests(sequence)
        length, previous = (len(sequence.all_token_ids) - 1) // self.block_size, -1
        # A group may shorten the hit to a length at which another's window is not cached.
        while length != previous:
            previous = length
            for group in range(len(self._windows)):
                length = self._hit(group, digests, length)
        tables = []
        for group, window in enumerate(self._windows):
            start = self._first_visible(window, length * self.block_size)
            found = [self._pool.found(group, digest) for digest in digests[start:length]]
            tables.append([NULL_BLOCK] * start + found)
        return PrefixMatch(length * self.block_size, tuple(tables))

    def allocate(
        self, sequence: CachedSequence, num_new_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens = {num_new_tokens}: must be at least 1")
        entry = self._entries.get(sequence.request_id)
        if entry is not None:
            # Nearly every decoding step: its block is there, and will not be full after it.
            if sequence.num_computed_tokens + num_new_tokens <= entry.quiet_until and match is None:
                return self._nothing
            if match is not None:
                raise ValueError(f"{sequence.request_id!r} already has blocks: match must be None")
            return self._grow(entry, sequence.num_computed_tokens, num_new_tokens)
        entry = _Entry(sequence, len(self._windows))
        if match is None:
            gained = self._grow(entry, sequence.num_computed_tokens, num_new_tokens)
        else:
            computed = sequence.num_computed_tokens + match.num_tokens
            gained = self._grow(entry, computed, num_new_tokens, match.block_ids)
        if gained is not None:
            self._entries[sequence.request_id] = entry
            if match is not None:
                self._count(sequence, match)
        return gained

    def block_ids(self, request_id: str) -> BlockIds:
        return tuple(list(table) for table in self._entries[request_id].tables)

    def free(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            for group, table in enumerate(entry.tables):
                self._offer(entry, group, range(len(table)), entry.sequence.num_computed_tokens)
            release = self._pool.release
            tables = (reversed(table) for table in entry.tables)
            for block_ids in zip_longest(*tables, fillvalue=NULL_BLOCK):
                for block_id in block_ids:
                    release(block_id)
        self._hashes.pop(request_id, None)

    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        if num_tokens > self.max_model_len:
            return False
        grown = zip(self._is_cross, self._windows)
        needed = sum(self._most_blocks(w, num_tokens) for cross, w in grown if not cross)
        return needed + self._num_cross * self._num_blocks(num_encoder_tokens) <= self.num_blocks

    def reset_prefix_cache(self) -> bool:
        if self.num_free_blocks != self.num_blocks:
            return False
        self._pool.clear_cached()
        return True

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def take_stats(self) -> KVCacheStats:
        stats = KVCacheStats(self._queries, self._hits)
        self._queries = self._hits = 0
        return stats

    def _grow(
        self, entry: _Entry, computed: int, num_new: int, matched: BlockIds | None = None
    ) -> BlockIds | None:
        """Take blocks for tokens ``computed`` .. ``computed + num_new``; None if too few."""
        total = computed + num_new
        pool, tables = self._pool, entry.tables
        num_matched = len(matched[self._growing]) if matched else 0
        missing = self._num_blocks(total) - len(tables[self._growing]) - num_matched
        counts = self._missing_by_group(entry, missing) if missing > 0 or matched else []
        if counts:
            needed = sum(counts) + self._num_claimed(matched)
            if needed > pool.num_free + self._num_releasable(entry, computed):
                return None
        if self._sliding:
            self._release_passed(entry, computed)
        gained: BlockIds
        if counts:
            if matched:
                for block_ids in matched:
                    pool.acquire(block_ids)
                gained = tuple([*ids, *pool.take(count)] for ids, count in zip(matched, counts))
                entry.num_registered = num_matched
            else:
                gained = tuple([pool.take(count) for count in counts])
            for table, new in zip(tables, gained):
                table.extend(new)
        else:
            gained = tuple([[] for _ in tables])
        self._register(entry, total)
        if not self._sliding:
            entry.quiet_until = self._quiet_until(entry)
        return gained

    def _missing_by_group(self, entry: _Entry, growing: int) -> list[int]:
        """Blocks that each group's table lacks, if those that grow lack so many."""
        if not self._num_cross:
            return [growing] * len(entry.tables)
        states = self._num_blocks(entry.sequence.num_encoder_tokens)
        pairs = zip(entry.tables, self._is_cross)
        return [states - len(table) if cross else growing for table, cross in pairs]

    def _quiet_until(self, entry: _Entry) -> int:
        """Length up to which no block is gained, and none is filled that is not findable yet."""
        held = len(entry.tables[self._growing])
        if self.enable_prefix_caching:
            return min(held, entry.num_registered + 1) * self.block_size - 1
        return held * self.block_size

    def _register(self, entry: _Entry, num_written: int) -> None:
        """Make full blocks of known tokens below ``num_written`` findable."""
        if not self.enable_prefix_caching:
            return
        end = min(num_written, len(entry.sequence.all_token_ids)) // self.block_size
        if end > entry.num_registered:
            for group in range(len(entry.tables)):
                self._offer(entry, group, range(entry.num_registered, end), num_written)
            entry.num_registered = end

    def _offer(self, entry: _Entry, group: int, indices: range, num_written: int) -> None:
        """Register blocks of one group, as far as they hold known tokens that are written.

        Also called as blocks are released: what was a duplicate when it was filled may be the only
        copy by now.
        """
        if not self.enable_prefix_caching:
            return
        known = min(num_written, len(entry.sequence.all_token_ids)) // self.block_size
        digests, table = self._digests(entry.sequence), entry.tables[group]
        for index in range(indices.start, min(indices.stop, known)):
            if table[index] != NULL_BLOCK:
                self._pool.register(table[index], group, digests[index])

    def _release_passed(self, entry: _Entry, computed: int) -> None:
        """Replace by the null block what a sliding window has left behind."""
        for group, window in self._sliding:
            table = entry.tables[group]
            start, end = entry.first_held[group], self._first_visible(window, computed)
            end = min(end, len(table))
            if start >= end:
                continue
            self._offer(entry, group, range(start, end), computed)
            for index in range(end - 1, start - 1, -1):
                self._pool.release(table[index])
                table[index] = NULL_BLOCK
            entry.first_held[group] = end

    def _num_releasable(self, entry: _Entry, computed: int) -> int:
        """Blocks that :meth:`_release_passed` would make free."""
        count = 0
        for group, window in self._sliding:
            passed = entry.tables[group][
                entry.first_held[group] : self._first_visible(window, computed)
            ]
            count += sum(self._pool.ref_counts[b] == 1 for b in passed if b != NULL_BLOCK)
        return count

    def _num_claimed(self, matched: BlockIds | None) -> int:
        """Matched blocks that are free now and so leave the free list."""
        counts = self._pool.ref_counts
        return sum(
            b != NULL_BLOCK and counts[b] == 0 for block_ids in matched or () for b in block_ids
        )

    def _hit(self, group: int, digests: Sequence[bytes], limit: int) -> int:
        """Longest usable hit of one group, in blocks, of at most ``limit`` blocks."""
        window, lookup = self._windows[group], self._pool.lookup
        if window is None:
            for index in range(limit):
                if lookup(group, digests[index]) is None:
                    return index
            return limit
        # Blocks that a query right after the hit can still see.
        needed = -(-(window - 1) // self.block_size)
        run = 0
        for index in range(limit - 1, -1, -1):
            if run == needed:
                return index + 1 + run
            run = run + 1 if lookup(group, digests[index]) is not None else 0
        return run

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _first_visible(self, window: int | None, position: int) -> int:
        """Index of the first block that a query at ``position``, or later, can see."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _most_blocks(self, window: int | None, num_tokens: int) -> int:
        """Blocks of one group that a lone request of that length holds at its peak."""
        all_blocks = self._num_blocks(num_tokens)
        if window is None:
            return all_blocks
        # window - 1 tokens before the step and the step's own, at the worst alignment.
        at_once = window - 1 + self._max_step_tokens
        return min(all_blocks, -(-at_once // self.block_size) + 1)

    def _digests(self, sequence: CachedSequence) -> list[bytes]:
        hashes = self._hashes.get(sequence.request_id)
        if hashes is None:
            hashes = BlockHashes(
                self.block_size, sequence.cache_salt, sequence.prompt_embeds, sequence.media
            )
            self._hashes[sequence.request_id] = hashes
        return hashes.extend(sequence.all_token_ids)

    def _count(self, sequence: CachedSequence, match: PrefixMatch) -> None:
        # Counted here and not in match_prefix: a waiting request is matched once a step.
        if self.enable_prefix_caching and not sequence.skip_reading_prefix_cache:
            self._queries += len(sequence.all_token_ids)
            self._hits += match.num_tokens


class _Entry:
    """What one request holds."""

    __slots__ = ("first_held", "num_registered", "quiet_until", "sequence", "tables")

    def __init__(self, sequence: CachedSequence, num_groups: int) -> None:
        self.sequence = sequence
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_registered = 0
        """Blocks, from the first, that were offered to the digest map."""
        self.quiet_until = 0
        """Growing to this many tokens changes nothing; 0 where sliding windows may pass."""
        self.first_held = [0] * num_groups
        """By group: entries before this one are null."""


def _window(spec: KVCacheSpec) -> int | None:
    return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None


def _check_config(config: KVCacheConfig, enable_prefix_caching: bool) -> None:
    if not config.groups:
        raise ConfigError("KV cache: no layer groups; a model without attention needs no cache")
    if config.num_blocks < 2:
        raise ConfigError(
            f"KV cache: num_blocks = {config.num_blocks}: must be at least 2, "
            "because block 0 is never handed out"
        )
    for group in config.groups:
        spec = group.spec
        if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec, CrossAttentionSpec)):
            raise ConfigError(
                f"KV cache: {type(spec).__name__} of layer {group.layer_names[0]!r} is not served; "
                "FullAttentionSpec, SlidingWindowSpec and CrossAttentionSpec are"
            )
        if isinstance(spec, SlidingWindowSpec) and spec.sliding_window < 1:
            raise ConfigError(
                f"KV cache: sliding_window = {spec.sliding_window} of layer "
                f"{group.layer_names[0]!r}: must be at least 1"
            )
        if isinstance(spec, CrossAttentionSpec) and spec.max_encoder_tokens < 1:
            raise ConfigError(
                f"KV cache: max_encoder_tokens = {spec.max_encoder_tokens} of layer "
                f"{group.layer_names[0]!r}: must be at least 1"
            )
        if spec.block_size != config.block_size:
            raise ConfigError(
                f"KV cache: block sizes {config.block_size} and {spec.block_size} differ; "
                "all groups must use the same"
            )
    crossing = [isinstance(group.spec, CrossAttentionSpec) for group in config.groups]
    if all(crossing):
        raise ConfigError("KV cache: layers of cross-attention only; a decoder has others too")
    if any(crossing) and enable_prefix_caching:
        raise ConfigError(
            "cache.enable_prefix_caching = True: must be False for encoder-decoder models, whose "
            "tokens depend on what the encoder read",
            field="cache.enable_prefix_caching",
        )
