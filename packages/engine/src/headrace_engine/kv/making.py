"""The cache manager that suits a model."""

from __future__ import annotations

from headrace_core.kv import KVCacheConfig, KVCacheManager
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.kv.uncached import UncachedKVManager


def make_manager(
    config: KVCacheConfig,
    enable_prefix_caching: bool,
    max_model_len: int,
    max_num_batched_tokens: int | None = None,
) -> KVCacheManager:
    """As :class:`PagedKVCacheManager` takes them; one that hands out nothing for a config without
    groups."""
    if not config.groups:
        return UncachedKVManager(max_model_len)
    return PagedKVCacheManager(config, enable_prefix_caching, max_model_len, max_num_batched_tokens)
