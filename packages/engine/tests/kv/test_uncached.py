from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace_core.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from headrace_engine.kv.contract import PrefixMatch
from headrace_engine.kv.factory import UncachedKVManager, make_manager
from headrace_engine.kv.manager import PagedKVCacheManager


def test_what_caches_nothing_has_room_for_every_prompt_and_finds_none() -> None:
    manager = make_manager(KVCacheConfig((), ()), True, 32)
    assert isinstance(manager, UncachedKVManager)
    sequence: Any = SimpleNamespace(request_id="a", all_token_ids=[1, 2, 3], num_computed_tokens=0)
    for _ in range(3):
        assert manager.match_prefix(sequence) == PrefixMatch(0, ())
        assert manager.allocate(sequence, 3) == ()
    assert manager.block_ids("a") == ()
    manager.free("a")
    assert (manager.fits(32), manager.fits(33)) == (True, False)
    assert (manager.num_blocks, manager.num_free_blocks) == (0, 0)
    assert manager.reset_prefix_cache()
    assert manager.take_stats() == (0, 0)


def test_who_caches_gets_pages() -> None:
    group = KVCacheGroup(("layer",), FullAttentionSpec(16, 1, 4, "float32"))
    assert isinstance(make_manager(KVCacheConfig((9,), (group,)), True, 32), PagedKVCacheManager)


def test_a_config_without_groups_has_no_sizes() -> None:
    config = KVCacheConfig((), ())
    assert (config.block_size, config.num_bytes) == (0, 0)
