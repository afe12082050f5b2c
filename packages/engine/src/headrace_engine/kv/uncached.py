"""The cache of a model that caches nothing: every request fits, nobody finds a prefix."""

from __future__ import annotations

from headrace_core.kv import BlockIds, CachedSequence, KVCacheManager, KVCacheStats, PrefixMatch

_NOTHING: BlockIds = ()


class UncachedKVManager(KVCacheManager):
    """See :class:`~headrace_core.kv.KVCacheManager`; there are no groups and no blocks.

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

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_free_blocks(self) -> int:
        return 0

    def take_stats(self) -> KVCacheStats:
        return KVCacheStats(0, 0)
