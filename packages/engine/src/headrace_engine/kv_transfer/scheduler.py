"""The scheduler's end: which blocks to load before a request runs, and which to save.

A request whose prefix is elsewhere waits in the queue while its blocks are loaded *into the prefix cache*:
into free blocks that nobody else has meanwhile, and that become findable once the worker has said that they
are there. Then it is scheduled as any other, and finds them as if they had been computed here. So
nothing is computed from a block before it is known to be right, whatever is in flight, and a block that could
not be loaded is one that is not found: it is computed.

What another engine has is brought near first (:class:`~headrace_engine.kv_transfer.fetches.BlockFetches`),
beside the steps: a step loads only what is here.

A step that fails leaves blocks behind that hold anything, and steps behind it in flight compute from them.
Moves carry an *epoch*, which rises when the scheduler learns of the failure; the worker saves nothing for
steps of the epoch that failed.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    NULL_BLOCK,
    CrossAttentionSpec,
    KVCacheConfig,
    RecurrentSpec,
)
from headrace_core.request import CoreRequest
from headrace_engine.kv.contract import CachedBlock, KVCacheManager
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.kv_transfer.fetches import BlockFetches
from headrace_engine.kv_transfer.moves import MOVES, KVMove, KVMoves
from headrace_engine.kv_transfer.params import DECODE, PREFILL, transfer_params
from headrace_engine.kv_transfer.settings import CONSUMER, FAIL, FIELD, PRODUCER
from headrace_engine.kv_transfer.whole_blocks import WholeBlocks
from headrace_engine.scheduler.request import SchedulerRequest

MAX_LOADED_BYTES = 64 << 20
"""Bytes of blocks that one step loads: others' next tokens wait for it."""


@dataclass(slots=True, eq=False)
class _Load:
    """Blocks that one request waits for."""

    request_id: str
    held: list[CachedBlock]
    """All of its prefix; references are dropped together."""
    wanted: set[bytes]
    """Keys of those that are loaded."""
    num_left: int
    failed: set[bytes] = field(default_factory=set)


class KVTransfer:
    """One engine's. Used from the scheduler's thread.

    Args:
        blocks: the store, whole blocks of all ranks.
        settings: ``cache.kv_transfer_config``, checked.
        model: names the model, its weights and how its cache is laid out: equal for two engines only if
            they compute the same bytes.
        config: the cache.
        kv: its manager, which has no blocks in use.
        saves_full_blocks: see :class:`~headrace_core.kv.KVConnector`.
        block_bytes: by cache group: bytes of a block that move, of all ranks together.
        num_ranks: that load at the same time.

    Raises:
        ConfigError: the manager or the model's layers cannot do this.
    """

    def __init__(
        self,
        blocks: WholeBlocks,
        settings: Mapping[str, Any],
        model: str,
        config: KVCacheConfig,
        kv: KVCacheManager,
        *,
        block_bytes: Sequence[int],
        saves_full_blocks: bool = True,
        num_ranks: int = 1,
    ) -> None:
        check_layers(config)
        if not isinstance(kv, PagedKVCacheManager) or not kv.enable_prefix_caching:
            raise ConfigError(
                "cache.enable_prefix_caching = False: must be left on with cache.kv_transfer_config, whose "
                "blocks are found as cached ones are",
                field="cache.enable_prefix_caching",
            )
        self._blocks = blocks
        self._kv = kv
        self._loads = settings["kv_role"] != PRODUCER
        self._saves = settings["kv_role"] != CONSUMER
        self._fails = settings["kv_load_failure_policy"] == FAIL
        self._model = model
        self._block_bytes = block_bytes
        self._most_loaded = MAX_LOADED_BYTES * num_ranks
        self._waiting: dict[str, _Load] = {}
        """By request: what it waits for."""
        self._queue: deque[tuple[_Load, KVMove]] = deque()
        """Blocks that no step loads yet."""
        self._in_flight: dict[int, list[tuple[_Load, KVMove]]] = {}
        """By step."""
        self._coming: set[bytes] = set()
        """Keys of blocks that are on their way."""
        self._epoch = 0
        self._loaded: set[str] = set()
        """Requests for which blocks were loaded since they came into the queue: once is enough, as a small
        cache may give the blocks up again before they run."""
        self._counted: set[str] = set()
        """Requests that were counted since."""
        self._fetches = BlockFetches(blocks)
        self._offered: set[str] = set()
        """Requests in the queue whose cached blocks were offered to the connector, for another engine."""
        self.failed_requests: dict[str, int] = {}
        """Requests that are to end, as so many of their blocks could not be loaded."""
        self.counters: Counter[str] = Counter(
            loaded_blocks=0, loaded_bytes=0, hit_tokens=0, failed_blocks=0, saved_blocks=0,
            saved_bytes=0, queried_tokens=0,
        )  # fmt: skip
        if self._saves:
            if saves_full_blocks:
                kv.notes_blocks = True
            else:
                for pool in kv.pools:
                    pool.given_up = []

    @property
    def is_loading(self) -> bool:
        """True while blocks are on their way: they are nobody's."""
        return bool(self._queue or self._in_flight)

    @property
    def has_moves(self) -> bool:
        """True if a step should be made for them, even if nobody runs in it."""
        return bool(self._queue or self._kv.filled or self.failed_requests)

    def waits(self, state: SchedulerRequest, num_cached_tokens: int) -> bool:
        """True if a request should wait until blocks are loaded, which begins here.

        Args:
            state: the head of the queue.
            num_cached_tokens: found in the pools.
        """
        request_id = state.request_id
        if request_id in self._waiting or request_id in self.failed_requests:
            return True
        params = transfer_params(state.request.params.extra_args)
        if params.get(DECODE) and self._saves:
            self._offer_again(state)
        if not self._loads or request_id in self._loaded or state.skip_reading_prefix_cache:
            return False
        if self._fetch(state, params):
            return True
        num_tokens, entries = self._kv.match_beyond(state, self._is_elsewhere(request_id))
        if request_id not in self._counted:
            self._counted.add(request_id)
            self.counters["queried_tokens"] += state.num_tokens - num_cached_tokens
        if num_tokens <= num_cached_tokens:
            return False
        keys = [self._key(b.group, b.digest) for b in entries if b.block_id == NULL_BLOCK]
        if not self._coming.isdisjoint(keys):  # for another request with the same prefix
            return True
        held = self._kv.hold(entries)
        if held is None:  # there will be room once others have ended
            return False
        self._loaded.add(request_id)
        self.counters["hit_tokens"] += num_tokens - num_cached_tokens
        moves = [
            KVMove(group, now.block_id, self._key(group, digest))
            for (group, before, digest), now in zip(entries, held)
            if before != now.block_id
        ]
        self._coming.update(keys)
        load = _Load(request_id, held, set(keys), len(moves))
        self._waiting[request_id] = load
        self._queue.extend((load, move) for move in moves)
        return True

    def forget(self, request_id: str) -> None:
        """A request has left the queue: it runs, is suspended, or has ended. What is on its way for it still
        comes into the cache."""
        self._loaded.discard(request_id)
        self._counted.discard(request_id)
        self._offered.discard(request_id)
        self._fetches.forget(request_id)
        self._blocks.left(request_id)
        self._waiting.pop(request_id, None)
        self.failed_requests.pop(request_id, None)

    def answer(self, request: CoreRequest) -> dict[str, Any] | None:
        """``kv_transfer_params`` for the engine that decodes, of a request that has ended; None: it has not
        asked for them."""
        if not transfer_params(request.params.extra_args).get(DECODE):
            return None
        return {PREFILL: True, DECODE: False, **self._blocks.address()}

    def metadata(self, step_id: int) -> dict[str, Any]:
        """The moves of a step that has been filled, for :attr:`ScheduledStep.connector_metadata`."""
        loads, room = [], self._most_loaded
        while self._queue and room > 0:
            load, move = self._queue.popleft()
            loads.append((load, move))
            room -= self._block_bytes[move.group]
        if loads:
            self._in_flight[step_id] = loads
        kv = self._kv
        first = [KVMove(b.group, b.block_id, self._key(b.group, b.digest)) for b in kv.filled]
        kv.filled.clear()
        for pool in kv.pools:
            if pool.given_up:
                first += [KVMove(g, b, self._key(g, digest)) for b, g, digest in pool.given_up]
                pool.given_up.clear()
        saved = [
            KVMove(b.group, b.block_id, self._key(b.group, b.digest))
            for b in kv.filling
            if kv.pool_of(b.group).digest_of(b.block_id) == b.digest
        ]
        kv.filling.clear()
        for move in (*first, *saved):
            self.counters["saved_blocks"] += 1
            self.counters["saved_bytes"] += self._block_bytes[move.group]
        return {MOVES: KVMoves(self._epoch, first, [move for _, move in loads], saved)}

    def landed(self, step_id: int, failed: list[bytes] | None) -> None:
        """A step has ended.

        Args:
            step_id: of the step.
            failed: keys of blocks that were not loaded; None: the step failed.
        """
        for load, move in self._in_flight.pop(step_id, ()):
            load.num_left -= 1
            self._coming.discard(move.key)
            if failed is None or move.key in failed:
                load.failed.add(move.key)
                self.counters["failed_blocks"] += 1
            else:
                self.counters["loaded_blocks"] += 1
                self.counters["loaded_bytes"] += self._block_bytes[move.group]
            if load.num_left == 0:
                self._complete(load, blames=failed is not None)

    def forget_content(self) -> None:
        """Find nothing from now on that was saved until now: the weights are others, or somebody asked."""
        self._model = secrets.token_hex(32)
        self._drop_noted()

    def forget_step(self) -> None:
        """A step has failed, and every cached block was forgotten: save nothing that is not written again."""
        self._epoch += 1
        self._drop_noted()

    def _fetch(self, state: SchedulerRequest, params: Mapping[str, Any]) -> bool:
        """True if a request should wait for blocks of another engine, or ends for want of them."""
        request_id = state.request_id
        if self._fetches.is_done(request_id):
            return False
        named = params if params.get(PREFILL) and not state.num_output_tokens else {}
        if self._fetches.waits(request_id, named, lambda: self._away(state)):
            return True
        missing = len(self._away(state)) if named else 0
        self.counters["failed_blocks"] += missing
        if missing and self._fails:
            self.failed_requests[request_id] = missing
        return bool(missing and self._fails)

    def _away(self, state: SchedulerRequest) -> dict[bytes, int]:
        """Blocks of a request's longest prefix, with their groups, that are neither in the pools, nor on
        their way there, nor at the connector as far as is known."""
        _, entries = self._kv.match_beyond(state, lambda group, digest: True)
        groups = {
            self._key(b.group, b.digest): b.group for b in entries if b.block_id == NULL_BLOCK
        }
        return {
            key: group
            for key, group in groups.items()
            if key not in self._coming and not self._blocks.contains(key, group, state.request_id)
        }

    def _offer_again(self, state: SchedulerRequest) -> None:
        """Save the blocks of a prompt that are cached here and that the connector has given up since."""
        if state.request_id in self._offered:
            return
        self._offered.add(state.request_id)
        _, entries = self._kv.match_beyond(state, lambda group, digest: False)
        # Nobody asks the other ranks whether they still have theirs: who has one keeps it.
        is_kept = self._is_elsewhere(state.request_id)
        again = self._blocks.are_divided
        self._kv.filled += [b for b in entries if again or not is_kept(b.group, b.digest)]

    def _drop_noted(self) -> None:
        self._kv.filled.clear()
        self._kv.filling.clear()
        for pool in self._kv.pools:
            if pool.given_up is not None:
                pool.given_up.clear()

    def _complete(self, load: _Load, *, blames: bool) -> None:
        self._kv.let_go(load.held, self._good_in(load))
        if self._waiting.get(load.request_id) is load:
            del self._waiting[load.request_id]
            if load.failed and self._fails and blames:
                self.failed_requests[load.request_id] = len(load.failed)

    def _good_in(self, load: _Load) -> Callable[[CachedBlock], bool]:
        def is_good(entry: CachedBlock) -> bool:
            key = self._key(entry.group, entry.digest)
            return key in load.wanted and key not in load.failed

        return is_good

    def _is_elsewhere(self, request_id: str) -> Callable[[int, bytes], bool]:
        def is_there(group: int, digest: bytes) -> bool:
            return self._blocks.contains(self._key(group, digest), group, request_id)

        return is_there

    def _key(self, group: int, digest: bytes) -> bytes:
        return sha256(f"{self._model}:{group}:".encode() + digest).digest()


def check_layers(config: KVCacheConfig) -> None:
    """Raises: ConfigError, layers keep what is no block of tokens."""
    if not config.groups:
        raise ConfigError(
            f"{FIELD}: must be left out for this model, which caches nothing", field=FIELD
        )
    kinds = {RecurrentSpec: "states of recurrent layers", CrossAttentionSpec: "encoder states"}
    for group in config.groups:
        what = kinds.get(type(group.spec))
        if what is not None:
            raise ConfigError(
                f"{FIELD}: must be left out for this model: layer {group.layer_names[0]!r} keeps {what}, "
                "which do not travel yet",
                field=FIELD,
            )
