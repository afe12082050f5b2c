"""The scheduler's end of KV transfer, made for an engine whose workers have their caches."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from headrace_core.executor import Executor
from headrace_core.kv import KVCacheConfig, KVConnector
from headrace_engine.config import EngineConfig
from headrace_engine.kv.contract import KVCacheManager
from headrace_engine.kv_transfer.layout import merged_layout
from headrace_engine.kv_transfer.rank_blocks import RankBlocks
from headrace_engine.kv_transfer.scheduler import KVTransfer
from headrace_engine.kv_transfer.settings import BY_LAYER
from headrace_engine.kv_transfer.whole_blocks import WholeBlocks


@runtime_checkable
class AsksOthers(Protocol):
    """An executor whose other ranks answer beside their passes."""

    def ask_others(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of each other rank's worker; results by rank from 1."""
        ...


def make_transfer(
    connector: KVConnector,
    config: EngineConfig,
    model: str,
    executor: Executor,
    cache: KVCacheConfig,
    kv: KVCacheManager,
) -> KVTransfer:
    """Transfer between a cache and rank 0's connector, and those of the other ranks.

    Args:
        model: names the model and its weights.
        executor: its workers have allocated their caches.
        cache: rank 0's.
        kv: its manager.

    Raises: as :class:`KVTransfer`.
    """
    reports = executor.call("report")
    settings = config.cache.kv_transfer_config
    own = RankBlocks(connector, reports[0]["kv_parts"])
    ask = executor.ask_others if isinstance(executor, AsksOthers) and len(reports) > 1 else None
    names_layers = config.parallel.pipeline_parallel_size > 1 or settings.get(BY_LAYER)
    layout = merged_layout(reports) if names_layers else reports[0]["kv_layout"]
    by_group = zip(*(one["kv_parts"] for one in reports), strict=True)
    return KVTransfer(
        WholeBlocks(own, ask),
        settings,
        f"{model}:{layout}",
        cache,
        kv,
        block_bytes=[sum(size for parts in ranks for _, size in parts) for ranks in by_group],
        saves_full_blocks=connector.saves_full_blocks,
        num_ranks=len(reports),
    )
