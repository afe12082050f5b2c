"""The size of the KV cache, and the numbers that it follows from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_core.errors import CapacityError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import CrossAttentionSpec, KVCacheConfig, KVCacheGroup, RecurrentSpec
from headrace_engine.config import CacheConfig, EngineConfig
from headrace_engine.execution.division import (
    CacheLimits,
    PoolNeed,
    divide,
    least_bytes,
    pool_needs,
    useful_bytes,
)

CPU_CACHE_BYTES = 4 << 30
"""On a CPU the cache is at most this large unless ``kv_cache_memory_bytes`` asks for another size,
or a single request of the longest context needs more: the memory is everybody's."""
CPU_USEFUL_ROUNDS = 2
"""On a CPU the cache holds at most this many full batches of the longest requests: one that runs,
one whose prefixes may still be asked for."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A planned cache. Sizes in bytes."""

    config: KVCacheConfig
    weights: int
    activations: int
    available: int
    """Free before anything was loaded."""
    decided_by: str
    """The limit that decided the size, in words."""
    max_model_len: int
    largest_batch: int
    """Number of requests of ``max_model_len`` tokens that the cache holds at once."""

    @property
    def cache(self) -> int:
        return self.config.num_bytes

    @classmethod
    def without_cache(
        cls, profile: MemoryProfile, max_model_len: int, limit: int | None = None
    ) -> CachePlan:
        """For a model that caches nothing.

        Args:
            limit: ``max_memory_bytes``.

        Raises:
            CapacityError: weights and activations take more.
        """
        _check_limit(profile, 0, limit)
        return cls(
            config=KVCacheConfig((), ()),
            weights=profile.weights,
            activations=profile.activations,
            available=profile.available,
            decided_by="the model, which has no layers that read one",
            max_model_len=max_model_len,
            largest_batch=0,
        )

    def describe(self) -> str:
        """A few lines for people."""
        head = (
            f"memory: {readable(self.available)} were free at start",
            f"  weights      {readable(self.weights):>12}",
            f"  activations  {readable(self.activations):>12}",
        )
        return "\n".join((*head, *self._describe_cache()))

    def _describe_cache(self) -> tuple[str, ...]:
        pools = range(len(self.config.pools))
        if not pools:
            return (f"  KV cache     {'none':>12}  by {self.decided_by}",)
        room = (
            f"  room for     {self.largest_batch} requests of {self.max_model_len} tokens"
            + self._encoder_states()
        )
        if len(pools) == 1:
            content = f"{self._describe_pool(0)}, by {self.decided_by}"
            return (f"  KV cache     {readable(self.cache):>12}  {content}", room)
        parts = (
            f"    pool {pool}     {readable(self._pool_bytes(pool)):>12}  {self._describe_pool(pool)}"
            for pool in pools
        )
        head = (
            f"  KV cache     {readable(self.cache):>12}  {len(pools)} pools, by {self.decided_by}"
        )
        return (head, *parts, room)

    def _describe_pool(self, pool: int) -> str:
        groups = self.config.groups_of(pool)
        blocks = self.config.pools[pool] - 1
        if isinstance(self.config.groups[groups[0]].spec, RecurrentSpec):
            content = f"{blocks} states of recurrent layers"
        else:
            content = f"{blocks} blocks of {self.config.block_size} tokens"
        return f"{content} in {len(groups)} group{'s' if len(groups) > 1 else ''}"

    def _pool_bytes(self, pool: int) -> int:
        return self.config.pools[pool] * self.config.block_bytes(pool)

    def _encoder_states(self) -> str:
        specs = (group.spec for group in self.config.groups)
        states = [s.max_encoder_tokens for s in specs if isinstance(s, CrossAttentionSpec)]
        return f" and {max(states)} encoder states" if states else ""


def plan_cache(
    profile: MemoryProfile,
    groups: Sequence[KVCacheGroup],
    cache: CacheConfig,
    limits: CacheLimits,
    *,
    device: str,
) -> CachePlan:
    """Decide the number of blocks.

    The size is, in this order: ``num_gpu_blocks_override`` blocks (the null block comes on top; of
    each pool that holds tokens); ``kv_cache_memory_bytes``; what weights and activations leave of
    ``max_memory_bytes``, or of ``gpu_memory_utilization`` of the memory available at start, on a CPU
    capped by :data:`CPU_CACHE_BYTES` and :data:`CPU_USEFUL_ROUNDS`.

    Args:
        profile: of the worker with the least memory.
        groups: see :mod:`headrace_core.kv`; at least one.
        cache: the user's settings.
        limits: the longest context, and how many requests and tokens a step has at most.
        device: torch's device type, with or without an index.

    Raises:
        CapacityError: a request of ``max_model_len`` tokens would not fit; says how many bytes are
            missing and which length would fit. Or a size that the user chose is more than the memory.
    """
    needs = pool_needs(groups, limits)
    rounds = CPU_USEFUL_ROUNDS * limits.max_num_seqs
    budget = _budget(profile, cache, needs, device=device, num_requests=rounds)
    pools = budget.pools(needs)
    if not _fits(pools, needs):
        fits = _longest_that_fits(budget, groups, limits)
        raise CapacityError(_too_small(profile, needs, pools, budget, limits.max_model_len, fits))
    config = KVCacheConfig(pools, tuple(groups))
    _check_limit(profile, config.num_bytes, cache.max_memory_bytes)
    _check_memory(profile, config, cache)
    return CachePlan(
        config=config,
        weights=profile.weights,
        activations=profile.activations,
        available=profile.available,
        decided_by=budget.decided_by,
        max_model_len=limits.max_model_len,
        largest_batch=min((count - 1) // need.held for count, need in zip(pools, needs)),
    )


def fit_max_model_len(
    profile: MemoryProfile,
    groups: Sequence[KVCacheGroup],
    cache: CacheConfig,
    limits: CacheLimits,
    *,
    device: str,
) -> int:
    """The longest context, up to ``max_model_len``, of which one request fits (``max_model_len = -1``).

    Raises:
        CapacityError: not even one token fits.
    """
    needs = pool_needs(groups, limits)
    budget = _budget(profile, cache, needs, device=device, num_requests=1)
    fits = _longest_that_fits(budget, groups, limits)
    if fits < 1:
        needs = pool_needs(groups, dataclasses.replace(limits, max_model_len=1))
        raise CapacityError(_too_small(profile, needs, budget.pools(needs), budget, 1, 0))
    return fits


def spare_bytes(
    profile: MemoryProfile, groups: Sequence[KVCacheGroup], cache: CacheConfig, limits: CacheLimits
) -> int:
    """Bytes that are left beside one request of the longest context; negative: that are missing.

    The caps of a cache on a CPU do not count: they give way to a request that needs more.

    Args:
        groups: none for a model that caches nothing.
    """
    whole = profile.available if cache.max_memory_bytes is None else cache.max_memory_bytes
    left = whole - profile.weights - profile.activations
    if not groups:
        return left
    needs = pool_needs(groups, limits)
    size = cache.kv_cache_memory_bytes
    if cache.num_gpu_blocks_override is not None:
        pools = _budget(profile, cache, needs, device="", num_requests=1).pools(needs)
        if missing := _missing(pools, needs):
            return -missing
        size = sum(count * need.block_bytes for count, need in zip(pools, needs))
    elif size is None:
        size, _ = _share(profile, cache, needs, None)
    return min(size, left) - least_bytes(needs)


@dataclass(frozen=True, slots=True)
class _Budget:
    """The bytes that the cache may have."""

    decided_by: str
    pools: Callable[[Sequence[PoolNeed]], tuple[int, ...]]
    """Blocks of each pool, the null block included."""


def _budget(
    profile: MemoryProfile,
    cache: CacheConfig,
    needs: Sequence[PoolNeed],
    *,
    device: str,
    num_requests: int,
) -> _Budget:
    """See :func:`plan_cache`; ``num_requests`` of the longest ones are enough on a CPU."""
    blocks = cache.num_gpu_blocks_override
    if blocks is not None:
        return _Budget(
            "num_gpu_blocks_override",
            lambda needs: tuple(1 + (blocks if n.most is None else n.most) for n in needs),
        )
    size, decided_by = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    if size is None:
        on_cpu = device.split(":")[0] == "cpu"
        size, decided_by = _share(profile, cache, needs, num_requests if on_cpu else None)
    return _Budget(decided_by, lambda needs: divide(needs, size))


def _share(
    profile: MemoryProfile,
    cache: CacheConfig,
    needs: Sequence[PoolNeed],
    num_requests: int | None,
) -> tuple[int, str]:
    """Bytes that the cache may take, and what decided."""
    if cache.max_memory_bytes is not None:
        share, by = cache.max_memory_bytes, "max_memory_bytes"
    else:
        share = int(profile.available * cache.gpu_memory_utilization)
        by = f"gpu_memory_utilization {cache.gpu_memory_utilization:g}"
    choices = [(share - profile.weights - profile.activations, by)]
    if num_requests is not None:
        capped = max(CPU_CACHE_BYTES, least_bytes(needs))
        choices.append((capped, f"the {readable(CPU_CACHE_BYTES)} default on a CPU"))
        useful = useful_bytes(needs, num_requests)
        choices.append((useful, f"need ({CPU_USEFUL_ROUNDS} full batches)"))
    return min(choices, key=lambda choice: choice[0])


def _check_limit(profile: MemoryProfile, cache: int, limit: int | None) -> None:
    needed = profile.weights + profile.activations + cache
    if limit is not None and needed > limit:
        raise CapacityError(
            f"max_memory_bytes = {limit}: weights ({readable(profile.weights)}), activations "
            f"({readable(profile.activations)}) and KV cache ({readable(cache)}) take {needed} bytes; "
            "give it more, or use fewer max_num_batched_tokens or a smaller cache"
        )


def _check_memory(profile: MemoryProfile, config: KVCacheConfig, cache: CacheConfig) -> None:
    """Refuse a cache of a chosen size that the memory cannot hold beside the model.

    The system would promise it all the same, and end the process when requests fill it.
    """
    chosen = {
        "--num-gpu-blocks-override": cache.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": cache.kv_cache_memory_bytes,
    }
    flag, value = next(((flag, v) for flag, v in chosen.items() if v is not None), ("", None))
    left = profile.available - profile.weights - profile.activations
    if value is None or config.num_bytes <= left:
        return
    raise CapacityError(
        f"{flag} = {value}: the KV cache takes {gibibytes(config.num_bytes)}, and "
        f"{gibibytes(max(0, left))} of memory are left for it ({gibibytes(profile.available)} free at start, "
        f"weights {readable(profile.weights)}, activations {readable(profile.activations)}). Give a smaller "
        f"{flag}, or leave it out: the cache is then sized by the memory"
    )


def _fits(pools: Sequence[int], needs: Sequence[PoolNeed]) -> bool:
    return all(count > need.needed for count, need in zip(pools, needs))


def _missing(pools: Sequence[int], needs: Sequence[PoolNeed]) -> int:
    """Bytes that pools have less than they need; what others have more does not help."""
    lacking = (max(0, need.needed + 1 - count) for count, need in zip(pools, needs))
    return sum(count * need.block_bytes for count, need in zip(lacking, needs))


def _longest_that_fits(budget: _Budget, groups: Sequence[KVCacheGroup], limits: CacheLimits) -> int:
    """Bisection over the length; 0 if not even one token fits."""
    low, high = 0, limits.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        needs = pool_needs(groups, dataclasses.replace(limits, max_model_len=middle))
        if _fits(budget.pools(needs), needs):
            low = middle
        else:
            high = middle - 1
    return low


def _too_small(
    profile: MemoryProfile,
    needs: Sequence[PoolNeed],
    pools: Sequence[int],
    budget: _Budget,
    max_model_len: int,
    fits: int,
) -> str:
    least = least_bytes(needs)
    missing = _missing(pools, needs)
    states = sum(need.least_bytes for need in needs if need.most is not None)
    of_states = f" ({readable(states)} of it for the states of recurrent layers)" if states else ""
    advice = (
        f"max_model_len of at most {fits} would fit; or raise kv_cache_memory_bytes, "
        f"max_memory_bytes or gpu_memory_utilization"
        if fits
        else "no context fits at all: free memory, use a smaller model, one that is stored in fewer bits, "
        "or fewer max_num_batched_tokens"
    )
    return (
        f"the KV cache is too small for one request of max_model_len = {max_model_len}: it needs "
        f"{readable(least)}{of_states}, {readable(missing)} more than there are (size by "
        f"{budget.decided_by}; {readable(profile.available)} free at start, weights "
        f"{readable(profile.weights)}, activations {readable(profile.activations)}). {advice}"
    )


def gibibytes(num_bytes: int) -> str:
    """A number of bytes in GiB, with three significant digits where it is small."""
    size = num_bytes / (1 << 30)
    return f"{size:.2f} GiB" if size >= 1 else f"{size:.3g} GiB"


def of_one_rank(config: EngineConfig) -> EngineConfig:
    """The configuration as one rank's memory is planned by it: ``max_memory_bytes`` is of all of them."""
    limit, size = config.cache.max_memory_bytes, config.parallel.num_ranks
    if limit is None or size == 1:
        return config
    cache = dataclasses.replace(config.cache, max_memory_bytes=max(1, limit // size))
    return dataclasses.replace(config, cache=cache)


def readable(num_bytes: int) -> str:
    """A number of bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
