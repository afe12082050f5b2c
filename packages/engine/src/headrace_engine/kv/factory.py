"""The cache manager that suits a model; :class:`UncachedKVManager` for one that caches nothing."""

from __future__ import annotations

from headrace_core.kv import KVCacheConfig
from headrace_engine.kv.contract import (
    BlockIds,
    CachedSequence,
    KVCacheManager,
    KVCacheStats,
    PrefixMatch,
)
from headrace_engine.kv.events import BlockEventLog
from headrace_engine.kv.manager import PagedKVCacheManager


def make_manager(
    config: KVCacheConfig,
    enable_prefix_caching: bool,
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
    most_behind: int = 0,
    events: BlockEventLog | None = None,
) -> KVCacheManager:
    """A manager; for a config without groups, one that hands out nothing. Arguments as of
    :class:`PagedKVCacheManager`."""
    if not config.groups:
        return UncachedKVManager(max_model_len)
    return PagedKVCacheManager(
        config, enable_prefix_caching, max_model_len, max_num_batched_tokens, most_behind, events
    )


_NOTHING: BlockIds = ()


class UncachedKVManager(KVCacheManager):
    """See :class:`~headrace_engine.kv.contract.KVCacheManager`; there are no groups and no blocks.

    Args:
        max_model_len: longest sequence, in tokens.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    def match_prefix(self, sequence: CachedSequence) -> PrefixMatch:
        return PrefixMatch(0, _NOTHING)

    def allocate(
        self, sequence: CachedSequence, num_new_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        return _NOTHING

    def block_ids(self, request_id: str) -> BlockIds:
        return _NOTHING

    def free(self, request_id: str) -> None:
        """Nothing is held."""

    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        return num_tokens <= self._max_model_len

    def reset_prefix_cache(self) -> bool:
        return True

    def forget_prefixes(self) -> None:
        """Nothing is found."""

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_free_blocks(self) -> int:
        return 0

    def take_stats(self) -> KVCacheStats:
        return KVCacheStats(0, 0)
