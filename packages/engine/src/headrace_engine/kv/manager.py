"""Paged cache for layers of every kind, from one pool of blocks for each size of page.

All tables that grow with a request have the same length, ``ceil(tokens / block_size)``; entries that
no later token reads are :data:`NULL_BLOCK`. Which those are, each group's policy says
(:mod:`headrace_engine.kv.policies`); what states need besides is in :mod:`headrace_engine.kv.states`. A
table of cross-attention layers has ``ceil(encoder states / block_size)`` entries from the request's
first tokens to its end; its blocks are never hashed, so nobody shares them.

Only *known* tokens are hashed. A step may be scheduled before the previous one's tokens are known;
blocks filled by such placeholders are registered by a later :meth:`PagedKVCacheManager.allocate`
or by :meth:`PagedKVCacheManager.free`, once ``all_token_ids`` has caught up.

Freed blocks may be handed out at once although a step in flight still writes to them: steps are
executed in the order in which they were scheduled, so whoever receives the block writes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from headrace_core.errors import ConfigError
from headrace_core.kv import NULL_BLOCK, KVCacheConfig
from headrace_engine.kv.block_pool import BlockPool
from headrace_engine.kv.contract import (
    BlockIds,
    CachedBlock,
    CachedSequence,
    KVCacheManager,
    KVCacheStats,
    NextBlocks,
    PrefixMatch,
)
from headrace_engine.kv.events import BlockEventLog
from headrace_engine.kv.hashing import BlockHashes
from headrace_engine.kv.policies import (
    CachePolicy,
    CrossAttentionPolicy,
    FullAttentionPolicy,
    RecurrentPolicy,
    RequestSize,
    WindowedPolicy,
    policy_of,
)
from headrace_engine.kv.request_blocks import RequestBlocks
from headrace_engine.kv.states import StateTables


class PagedKVCacheManager(KVCacheManager):
    """See :class:`~headrace_engine.kv.contract.KVCacheManager`.

    Args:
        config: sizes of the pools, and layer groups.
        enable_prefix_caching: False matches nothing and hashes nothing. Must be False with groups
            of cross-attention layers: equal tokens mean nothing where encoder states differ.
        max_model_len: longest sequence, in tokens.
        max_num_batched_tokens: most tokens of one step. Known, it lets :meth:`fits` count for groups
            with windows or chunks only what one step can hold at a time; None counts every token.
        most_behind: tokens by which a request's recurrent states may be behind what is computed of it, as
            guesses were wrong: windows keep so many more, and states that a request leaves while it generates
            are not kept.
        events: gets the blocks that become findable, and those that cease to be; None: nobody listens.

    Raises:
        ConfigError: no groups, a pool without a usable block, unequal block sizes, or a kind of layer
            that this manager does not serve.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        enable_prefix_caching: bool,
        max_model_len: int,
        max_num_batched_tokens: int | None = None,
        most_behind: int = 0,
        events: BlockEventLog | None = None,
    ) -> None:
        self._policies = [policy_of(group) for group in config.groups]
        _check_config(config, self._policies, enable_prefix_caching)
        self.block_size = config.block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_model_len = max_model_len
        self._pools = [BlockPool(count, len(config.groups)) for count in config.pools]
        self._pool_indices = [group.pool for group in config.groups]
        self._pool_of = [self._pools[index] for index in self._pool_indices]
        policies = list(enumerate(self._policies))
        self._passing = [
            (g, policy)
            for g, policy in policies
            if isinstance(policy, (WindowedPolicy, RecurrentPolicy))
        ]
        self._has_windows = any(isinstance(policy, WindowedPolicy) for policy in self._policies)
        self._cross = [g for g, policy in policies if isinstance(policy, CrossAttentionPolicy)]
        self._token_groups = [
            g
            for g, policy in policies
            if not isinstance(policy, (CrossAttentionPolicy, RecurrentPolicy))
        ]
        recurrent = {
            g: self._pool_of[g] for g, policy in policies if isinstance(policy, RecurrentPolicy)
        }
        self._states = StateTables(recurrent, self.block_size)
        self._most_behind = most_behind if recurrent else 0
        self._max_step_tokens = max_num_batched_tokens
        if max_num_batched_tokens is not None:
            self._max_step_tokens = max_num_batched_tokens + self._most_behind
        self._growing = next(
            g for g, policy in policies if not isinstance(policy, CrossAttentionPolicy)
        )
        """A group whose table grows with its request."""
        self._nothing: BlockIds = tuple([] for _ in policies)
        self._is_plain = [type(policy) for policy in self._policies] == [FullAttentionPolicy]
        """True if there is one group, whose tables only grow."""
        self._entries: dict[str, RequestBlocks] = {}
        self._hashes: dict[str, BlockHashes] = {}
        self._branches: dict[str, int] = {}
        """By request: tokens of its prompt that others have computed, where no state of them is."""
        self._queries = self._hits = 0
        self.notes_blocks = False
        """Blocks that become findable are noted in the next two, until somebody takes them out."""
        self.filled: list[CachedBlock] = []
        """Those that steps wrote which are scheduled already."""
        self.filling: list[CachedBlock] = []
        """Those that are complete only after the step that is being scheduled."""
        self._events = events
        if events is not None:
            for pool in self._pools:
                pool.on_forgotten = events.removed

    def match_prefix(self, sequence: CachedSequence) -> PrefixMatch:
        if not self.enable_prefix_caching or sequence.skip_reading_prefix_cache:
            return PrefixMatch(0, tuple([] for _ in self._policies))
        digests = self._digests(sequence)
        length = self._longest_match(sequence)
        if self._is_plain:
            block_ids = self._pools[0].found_prefix(0, digests[:length])
            return PrefixMatch(len(block_ids) * self.block_size, (block_ids,))
        if self._states.groups and self._token_groups:
            length = self._common_hit(self._token_groups, digests, length)
            self._branches[sequence.request_id] = length * self.block_size
        length = self._common_hit(range(len(self._policies)), digests, length)
        tables = []
        for group, policy in enumerate(self._policies):
            start = policy.first_visible(length * self.block_size)
            pool = self._pool_of[group]
            found = [pool.found(group, digest) for digest in digests[start:length]]
            tables.append([NULL_BLOCK] * start + found)
        return PrefixMatch(length * self.block_size, tuple(tables))

    def allocate(
        self, sequence: CachedSequence, num_new_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        if num_new_tokens < 1:
            raise ValueError(f"num_new_tokens = {num_new_tokens}: must be at least 1")
        entry = self._entries.get(sequence.request_id)
        if entry is not None:
            total = sequence.num_computed_tokens + num_new_tokens
            # Nearly every decoding step: its block is there, and will not be full after it.
            if total <= entry.no_allocation_until and match is None:
                return self._nothing
            if match is None and self._is_plain:
                return self._grow_plain(entry, total)
            if match is not None:
                raise ValueError(f"{sequence.request_id!r} already has blocks: match must be None")
            return self._grow(entry, sequence.num_computed_tokens, num_new_tokens)
        entry = RequestBlocks(sequence, len(self._policies))
        if match is None:
            gained = self._grow(entry, sequence.num_computed_tokens, num_new_tokens)
        elif self._is_plain and not match.num_tokens:
            gained = self._grow_plain(entry, sequence.num_computed_tokens + num_new_tokens)
        else:
            computed = sequence.num_computed_tokens + match.num_tokens
            gained = self._grow(entry, computed, num_new_tokens, match.block_ids)
        if gained is not None:
            self._entries[sequence.request_id] = entry
            if match is not None:
                self._count(sequence, match)
        return gained

    def allocate_each(self, sequences: Iterable[CachedSequence]) -> Iterator[NextBlocks]:
        """See :meth:`KVCacheManager.allocate_each`. Where there is one group, whose tables only grow, this is
        :meth:`_grow_plain` with all that is the same for hundreds of requests of a step looked up once."""
        if not self._is_plain:
            yield from super().allocate_each(sequences)
            return
        (pool,), size, entries, nothing = self._pools, self.block_size, self._entries, self._nothing
        caching, take_one = self.enable_prefix_caching, pool.take_one
        for sequence in sequences:
            entry = entries[sequence.request_id]
            total, gained = sequence.num_computed_tokens + 1, nothing
            until = entry.no_allocation_until
            if total > until:
                table = entry.tables[0]
                missing = -(-total // size) - len(table)
                if missing > pool.num_free:
                    yield None, 0, 0
                    continue
                if missing > 0:  # one, but after an error
                    gained = ([take_one()] if missing == 1 else pool.take(missing),)
                    table += gained[0]
                entry.no_allocation_until = until = len(table) * size
                if caching:
                    token_ids = sequence.all_token_ids
                    known = min(total, len(token_ids)) // size
                    if known > entry.num_registered:
                        self._register_plain(entry, known, token_ids)
                    entry.no_allocation_until = until = min(len(table), known + 1) * size - 1
            yield gained, until, until + (caching and until > 0)

    # -- blocks that are elsewhere -----------------------------------------------------------------

    @property
    def pools(self) -> Sequence[BlockPool]:
        """All pools."""
        return self._pools

    def pool_of(self, group: int) -> BlockPool:
        """The pool that a group's blocks are from."""
        return self._pool_of[group]

    def match_beyond(
        self, sequence: CachedSequence, is_elsewhere: Callable[[int, bytes], bool]
    ) -> tuple[int, list[CachedBlock]]:
        """The longest prefix of which every entry that is read is cached here or elsewhere.

        Args:
            sequence: has no blocks.
            is_elsewhere: of a group and a digest.

        Returns:
            Tokens, and the entries; ``block_id`` is :data:`NULL_BLOCK` of those that are not here.
        """
        digests = self._digests(sequence)
        every = range(len(self._policies))

        def find(group: int, digest: bytes) -> int | None:
            found = self._pool_of[group].lookup(group, digest)
            return NULL_BLOCK if found is None and is_elsewhere(group, digest) else found

        length = self._common_hit(every, digests, self._longest_match(sequence), find)
        entries = []
        for group in every:
            start = self._policies[group].first_visible(length * self.block_size)
            for digest in digests[start:length]:
                found = self._pool_of[group].lookup(group, digest)
                entries.append(CachedBlock(group, found or NULL_BLOCK, digest))
        return length * self.block_size, entries

    def hold(self, entries: Sequence[CachedBlock]) -> list[CachedBlock] | None:
        """Reference blocks, a free one for each that is not here: all with their block's id; None, with
        nothing changed, if a pool has too few."""
        room = [pool.num_free for pool in self._pools]
        for group, block_id, _ in entries:
            if block_id == NULL_BLOCK or self._pool_of[group].ref_counts[block_id] == 0:
                room[self._pool_indices[group]] -= 1
        if min(room) < 0:
            return None
        for (
            group,
            block_id,
            _,
        ) in entries:  # all of them first: nothing that is taken may be one of them
            self._pool_of[group].acquire([block_id])
        return [
            entry
            if entry.block_id != NULL_BLOCK
            else entry._replace(block_id=self._pool_of[entry.group].take(1)[0])
            for entry in entries
        ]

    def let_go(
        self, entries: Sequence[CachedBlock], is_good: Callable[[CachedBlock], bool]
    ) -> None:
        """Drop the references of :meth:`hold`, last entry first; good entries are found from now on."""
        for entry in reversed(entries):
            pool = self._pool_of[entry.group]
            if is_good(entry):
                pool.register(entry.block_id, entry.group, entry.digest)
            pool.release(entry.block_id)

    def snapshot_at(self, sequence: CachedSequence, num_computed_tokens: int) -> int:
        if not self.enable_prefix_caching or not self._states.groups:
            return 0
        # Where the prompt parts from one that came before, others may part as well; and the whole of
        # it may be asked for again. Pan et al. 2024, arXiv:2411.19379.
        branch = self._branches.get(sequence.request_id, 0)
        last = (len(sequence.all_token_ids) - 1) // self.block_size * self.block_size
        return next((end for end in (branch, last) if end > num_computed_tokens), 0)

    def quiet_until(self, request_id: str) -> tuple[int, int]:
        until = self._entries[request_id].no_allocation_until
        # The token that fills a block makes it findable only once that token is known.
        return until, until + (self.enable_prefix_caching and until > 0)

    def block_ids(self, request_id: str) -> BlockIds:
        return tuple(list(table) for table in self._entries[request_id].tables)

    def free(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            computed = entry.sequence.num_computed_tokens
            for group in self._token_groups:
                self._offer(entry, group, range(len(entry.tables[group])), computed)
            self._release(entry, computed)
        self._hashes.pop(request_id, None)
        self._branches.pop(request_id, None)

    def _release(self, entry: RequestBlocks, computed: int) -> None:
        """Drop all references of a request, last block first."""
        if self._is_plain:
            self._pools[0].release_each(reversed(entry.tables[0]))
            return
        if self._keeps_state(entry, computed):
            self._keep_state(entry, computed)
        releases = [pool.release for pool in self._pool_of]
        tables = (reversed(table) for table in entry.tables)
        for block_ids in zip_longest(*tables, fillvalue=NULL_BLOCK):
            for release, block_id in zip(releases, block_ids):
                release(block_id)

    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        if num_tokens > self.max_model_len:
            return False
        request = RequestSize(
            num_tokens, num_encoder_tokens, self._max_step_tokens, self.enable_prefix_caching
        )
        room = [pool.num_blocks - 1 for pool in self._pools]
        for index, policy in zip(self._pool_indices, self._policies):
            room[index] -= policy.most_blocks(request)
        return min(room) >= 0

    def reset_prefix_cache(self) -> bool:
        if self.num_free_blocks != self.num_blocks:
            return False
        self._clear_cached()
        return True

    def forget_prefixes(self) -> None:
        self._clear_cached()
        for entry in self._entries.values():
            entry.is_private = True

    def _clear_cached(self) -> None:
        for pool in self._pools:
            pool.clear_cached()
        if self._events is not None:
            self._events.cleared()

    @property
    def num_blocks(self) -> int:
        return sum(pool.num_blocks - 1 for pool in self._pools)

    @property
    def num_free_blocks(self) -> int:
        return sum(pool.num_free for pool in self._pools)

    @property
    def usage(self) -> float:
        sizes = ((pool.num_blocks - 1, pool.num_free) for pool in self._pools)
        return max((size - free) / size for size, free in sizes)

    def take_stats(self) -> KVCacheStats:
        stats = KVCacheStats(self._queries, self._hits)
        self._queries = self._hits = 0
        return stats

    # -- growing -------------------------------------------------------------------------------

    def _grow(
        self, entry: RequestBlocks, computed: int, num_new: int, matched: BlockIds | None = None
    ) -> BlockIds | None:
        """Take blocks for tokens ``computed`` .. ``computed + num_new``; None if too few."""
        total = computed + num_new
        num_matched = len(matched[self._growing]) if matched else 0
        missing = -(-total // self.block_size) - len(entry.tables[self._growing]) - num_matched
        counts: list[int] | None = None
        if missing > 0 or matched:
            counts = self._wanted(entry, computed, missing, matched)
            if counts is None:
                return None
        if self._passing:
            self._release_passed(entry, computed)
        gained: BlockIds = tuple([] for _ in entry.tables)
        if counts is not None:
            gained = self._take(entry, computed, missing, counts, matched)
        self._register(entry, total)
        if not self._has_windows:
            entry.no_allocation_until = self._no_allocation_until(entry)
        return gained

    def _grow_plain(self, entry: RequestBlocks, total: int) -> BlockIds | None:
        """:meth:`_grow` to ``total`` tokens where there is one group, whose tables only grow: thousands of
        decoding requests come here every few steps."""
        (table,), (pool,), size = entry.tables, self._pools, self.block_size
        gained = self._nothing
        if total > len(table) * size:
            missing = -(-total // size) - len(table)
            if pool.num_free < missing:
                return None
            gained = (pool.take(missing),)
            table += gained[0]
        entry.no_allocation_until = len(table) * size
        if self.enable_prefix_caching:
            token_ids = entry.sequence.all_token_ids
            known = min(total, len(token_ids)) // size
            if known > entry.num_registered:
                self._register_plain(entry, known, token_ids)
            entry.no_allocation_until = min(len(table), known + 1) * size - 1
        return gained

    def _register_plain(
        self, entry: RequestBlocks, num_known: int, token_ids: Sequence[int]
    ) -> None:
        """:meth:`_register` for the first ``num_known`` blocks where there is one group."""
        first, entry.num_registered = entry.num_registered, num_known
        if entry.is_private:
            return
        hashes = entry.hashes
        if hashes is None:
            hashes = entry.hashes = self._hashes_of(entry.sequence)
        digests, table, register = (
            hashes.extend(token_ids),
            entry.tables[0],
            self._pools[0].register,
        )
        for index in range(first, num_known):
            is_new = register(table[index], 0, digests[index])
            if is_new and (self.notes_blocks or self._events is not None):
                self._tell_registered(entry, 0, index, self.filling)

    def _wanted(
        self, entry: RequestBlocks, computed: int, missing: int, matched: BlockIds | None
    ) -> list[int] | None:
        """New blocks by group, if tables that grow lack ``missing`` entries; None if a pool has too
        few. A state gets another block only where what it is now is to stay."""
        counts = [missing] * len(entry.tables)
        for group in self._cross:
            states = self._policies[group].blocks(entry.sequence.num_encoder_tokens)
            counts[group] = states - len(entry.tables[group])
        for group in self._states.groups:
            counts[group] = not entry.tables[group]
        room = self._room(entry, computed, matched)
        for index, count in zip(self._pool_indices, counts):
            room[index] -= count
        if min(room) < 0:
            return None
        if self._keeps_state(entry, computed):
            for group in self._states.groups:
                room[self._pool_indices[group]] -= 1
            if min(room) >= 0:
                for group in self._states.groups:
                    counts[group] = 1
        return counts

    def _room(self, entry: RequestBlocks, computed: int, matched: BlockIds | None) -> list[int]:
        """By pool: blocks that are free once the matched ones are taken, and those that the request
        has passed are not."""
        room = [pool.num_free for pool in self._pools]
        for group, block_ids in enumerate(matched or ()):
            counts = self._pool_of[group].ref_counts
            claimed = sum(b != NULL_BLOCK and counts[b] == 0 for b in block_ids)
            room[self._pool_indices[group]] -= claimed
        for group, policy in self._passing:
            counts = self._pool_of[group].ref_counts
            end = policy.first_visible(self._settled(entry, policy, computed))
            passed = entry.tables[group][entry.first_held[group] : end]
            released = sum(counts[b] == 1 for b in passed if b != NULL_BLOCK)
            room[self._pool_indices[group]] += released
        return room

    def _take(
        self,
        entry: RequestBlocks,
        computed: int,
        missing: int,
        counts: list[int],
        matched: BlockIds | None,
    ) -> BlockIds:
        """Blocks that every table gains; :meth:`_wanted` has counted them."""
        gained: BlockIds = tuple([] for _ in counts)
        if matched:  # all of them first: nothing that is taken may be one of them
            for pool, ids, block_ids in zip(self._pool_of, gained, matched):
                pool.acquire(block_ids)
                ids += block_ids
            entry.num_registered = len(matched[self._growing])
        elif any(entry.tables[group] and counts[group] for group in self._states.groups):
            self._keep_state(entry, computed)
        for group, (ids, count) in enumerate(zip(gained, counts)):
            new = self._pool_of[group].take(count)
            if group in self._states.groups:
                new = new or [self._states.move(entry, group, missing)]
                new = [NULL_BLOCK] * (missing - 1) + new
            ids += new
            entry.tables[group] += ids
        return gained

    def _settled(self, entry: RequestBlocks, policy: CachePolicy, computed: int) -> int:
        """The first position that a request may still be computed from."""
        sequence = entry.sequence
        unsettled = sequence.num_computed_tokens - sequence.num_settled_tokens  # guesses in flight
        behind = 0 if isinstance(policy, RecurrentPolicy) else self._most_behind
        return max(0, computed - unsettled - behind)

    def _no_allocation_until(self, entry: RequestBlocks) -> int:
        """Length up to which no block is gained or given up, and none is filled that is not findable
        yet."""
        if not self._states.is_settled(entry):
            return 0
        held = len(entry.tables[self._growing])
        if self.enable_prefix_caching:
            return min(held, entry.num_registered + 1) * self.block_size - 1
        return held * self.block_size

    def _release_passed(self, entry: RequestBlocks, computed: int) -> None:
        """Replace by the null block what nobody will read from this request's table."""
        for group, policy in self._passing:
            table, pool = entry.tables[group], self._pool_of[group]
            visible = policy.first_visible(self._settled(entry, policy, computed))
            start, end = entry.first_held[group], min(visible, len(table))
            if start >= end:
                continue
            if group in self._token_groups:
                self._offer(entry, group, range(start, end), computed)
            for index in range(end - 1, start - 1, -1):
                pool.release(table[index])
                table[index] = NULL_BLOCK
            entry.first_held[group] = end

    # -- prefix cache --------------------------------------------------------------------------

    def _register(self, entry: RequestBlocks, num_written: int) -> None:
        """Make full blocks of known tokens below ``num_written`` findable."""
        if not self.enable_prefix_caching:
            return
        end = min(num_written, len(entry.sequence.all_token_ids)) // self.block_size
        if end > entry.num_registered:
            for group in self._token_groups:
                self._offer(
                    entry, group, range(entry.num_registered, end), num_written, self.filling
                )
            entry.num_registered = end

    def _offer(
        self,
        entry: RequestBlocks,
        group: int,
        indices: range,
        num_written: int,
        noted: list[CachedBlock] | None = None,
    ) -> None:
        """Register blocks of one group, as far as they hold known tokens that are written; ``noted`` gains
        them, else :attr:`filled` does.

        Also called as blocks are released: what was a duplicate when it was filled may be the only
        copy by now.
        """
        if not self.enable_prefix_caching or entry.is_private:
            return
        sequence, table, pool = entry.sequence, entry.tables[group], self._pool_of[group]
        known = min(num_written, len(sequence.all_token_ids)) // self.block_size
        digests = self._digests(sequence)
        start, end = indices.start, min(indices.stop, known)
        for place in pool.register_each(table[start:end], group, digests[start:end]):
            noted_now = self.filled if noted is None else noted
            self._tell_registered(entry, group, start + place, noted_now)

    def _tell_registered(
        self, entry: RequestBlocks, group: int, index: int, noted: list[CachedBlock]
    ) -> None:
        """A block has become findable: tell, and note it, if somebody asks."""
        if self._events is not None:
            self._tell_stored(entry, index)
        if self.notes_blocks:
            digest = self._digests(entry.sequence)[index]
            noted.append(CachedBlock(group, entry.tables[group][index], digest))

    def _keeps_state(self, entry: RequestBlocks, computed: int) -> bool:
        """True if the state after ``computed`` tokens is there, and worth being found again."""
        states = self._states
        if not self.enable_prefix_caching or not states.groups or entry.is_private:
            return False
        if self._most_behind and computed > entry.num_given:
            return False
        return states.at_boundary(entry, computed) and states.is_new(
            self._digests(entry.sequence)[computed // self.block_size - 1]
        )

    def _keep_state(self, entry: RequestBlocks, computed: int) -> None:
        index = computed // self.block_size - 1
        digest = self._digests(entry.sequence)[index]
        for group in self._states.groups:
            is_new = self._states.keep(entry, group, computed, digest)
            if is_new and self._events is not None:
                self._tell_stored(entry, index)

    def _tell_stored(self, entry: RequestBlocks, index: int) -> None:
        assert self._events is not None
        sequence, size = entry.sequence, self.block_size
        digests = self._digests(sequence)
        self._events.stored(
            digests[index],
            digests[index - 1] if index else None,
            sequence.all_token_ids[index * size : (index + 1) * size],
            sequence.adapter_digest,
        )

    def _longest_match(self, sequence: CachedSequence) -> int:
        """Most blocks that may be found of a request: one token at least is computed."""
        return (len(sequence.all_token_ids) - 1) // self.block_size

    def _common_hit(
        self,
        groups: Sequence[int],
        digests: Sequence[bytes],
        length: int,
        find: Callable[[int, bytes], int | None] | None = None,
    ) -> int:
        """Longest hit of all of these groups, in blocks, of at most ``length`` blocks. ``find`` says where
        an entry is; None: it looks into the pools."""
        previous = -1
        # A group may shorten the hit to a length at which another's window is not cached.
        while length != previous:
            previous = length
            for group in groups:
                length = self._hit(group, digests, length, find)
        return length

    def _hit(
        self,
        group: int,
        digests: Sequence[bytes],
        limit: int,
        find: Callable[[int, bytes], int | None] | None = None,
    ) -> int:
        """Longest usable hit of one group, in blocks, of at most ``limit`` blocks."""
        policy, lookup = self._policies[group], find or self._pool_of[group].lookup
        if isinstance(policy, FullAttentionPolicy):
            for index in range(limit):
                if lookup(group, digests[index]) is None:
                    return index
            return limit
        # From the end: a hole shortens the hit to where it is, until the last token's view has none.
        length, index = limit, limit - 1
        while index >= policy.first_visible(length * self.block_size):
            if lookup(group, digests[index]) is None:
                length = index
            index -= 1
        return length

    def _digests(self, sequence: CachedSequence) -> list[bytes]:
        return self._hashes_of(sequence).extend(sequence.all_token_ids)

    def _hashes_of(self, sequence: CachedSequence) -> BlockHashes:
        hashes = self._hashes.get(sequence.request_id)
        if hashes is None:
            hashes = BlockHashes(
                self.block_size,
                sequence.cache_salt,
                sequence.prompt_embeds,
                sequence.media,
                sequence.adapter_digest,
            )
            self._hashes[sequence.request_id] = hashes
        return hashes

    def _count(self, sequence: CachedSequence, match: PrefixMatch) -> None:
        # Counted here and not in match_prefix: a waiting request is matched once a step.
        if self.enable_prefix_caching and not sequence.skip_reading_prefix_cache:
            self._queries += len(sequence.all_token_ids)
            self._hits += match.num_tokens


def _check_config(
    config: KVCacheConfig, policies: list[CachePolicy], enable_prefix_caching: bool
) -> None:
    if not config.groups:
        raise ConfigError("KV cache: no layer groups; a model without attention needs no cache")
    for pool, num_blocks in enumerate(config.pools):
        if num_blocks < 2:
            raise ConfigError(
                f"KV cache: pools[{pool}] = {num_blocks} blocks: must be at least 2, "
                "because block 0 is never handed out"
            )
    for group in config.groups:
        if not 0 <= group.pool < len(config.pools):
            raise ConfigError(
                f"KV cache: pool = {group.pool} of layer {group.layer_names[0]!r}: there are "
                f"{len(config.pools)}"
            )
        if group.spec.block_size != config.block_size:
            raise ConfigError(
                f"KV cache: block sizes {config.block_size} and {group.spec.block_size} differ; "
                "all groups must use the same"
            )
    crossing = [isinstance(policy, CrossAttentionPolicy) for policy in policies]
    if all(crossing):
        raise ConfigError("KV cache: layers of cross-attention only; a decoder has others too")
    if any(crossing) and enable_prefix_caching:
        raise ConfigError(
            "cache.enable_prefix_caching = True: must be False for encoder-decoder models, whose "
            "tokens depend on what the encoder read",
            field="cache.enable_prefix_caching",
        )
