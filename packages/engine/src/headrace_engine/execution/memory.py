"""How large the KV cache becomes, and what was weighed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_core.config import CacheConfig
from headrace_core.errors import CapacityError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import CrossAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec

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
    """What limited the size, in words."""
    max_model_len: int
    blocks_per_request: int
    """That one request of ``max_model_len`` tokens needs."""
    largest_batch: int
    """How many such requests the cache holds at once."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.config.num_blocks

    @property
    def cache(self) -> int:
        return self.num_blocks * self.config.block_bytes

    def _encoder_states(self) -> str:
        specs = (group.spec for group in self.config.groups)
        states = [s.max_encoder_tokens for s in specs if isinstance(s, CrossAttentionSpec)]
        return f" and {max(states)} encoder states" if states else ""

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
            config=KVCacheConfig(0, ()),
            weights=profile.weights,
            activations=profile.activations,
            available=profile.available,
            decided_by="the model, which has no attention that reads one",
            max_model_len=max_model_len,
            blocks_per_request=0,
            largest_batch=0,
        )

    def describe(self) -> str:
        """A few lines for people."""
        head = (
            f"memory: {_size(self.available)} were free at start",
            f"  weights      {_size(self.weights):>12}",
            f"  activations  {_size(self.activations):>12}",
        )
        return "\n".join((*head, *self._describe_cache()))

    def _describe_cache(self) -> tuple[str, ...]:
        groups = len(self.config.groups)
        if not groups:
            return (f"  KV cache     {'none':>12}  by {self.decided_by}",)
        blocks = (
            f"{self.num_blocks - 1} blocks of {self.config.block_size} tokens in {groups} "
            f"group{'s' if groups > 1 else ''}, by {self.decided_by}"
        )
        return (
            f"  KV cache     {_size(self.cache):>12}  {blocks}",
            f"  room for     {self.largest_batch} requests of {self.max_model_len} tokens"
            + self._encoder_states(),
        )


def plan_cache(
    profile: MemoryProfile,
    groups: Sequence[KVCacheGroup],
    cache: CacheConfig,
    *,
    max_model_len: int,
    max_num_seqs: int,
    device: str,
    max_num_batched_tokens: int | None = None,
) -> CachePlan:
    """Decide the number of blocks.

    The size is, in this order: ``num_gpu_blocks_override`` blocks (the null block comes on top);
    ``kv_cache_memory_bytes``; what weights and activations leave of ``max_memory_bytes``, or of
    ``gpu_memory_utilization`` of the memory available at start, on a CPU capped by
    :data:`CPU_CACHE_BYTES` and :data:`CPU_USEFUL_ROUNDS`.

    Args:
        profile: of the worker with the least memory.
        groups: see :mod:`headrace_core.kv`; at least one.
        cache: the user's settings.
        max_model_len: longest context.
        max_num_seqs: most requests in one step.
        device: torch's device type, with or without an index.
        max_num_batched_tokens: most tokens of one step; known, it lets sliding-window groups
            count what one request really holds. None counts every token.

    Raises:
        CapacityError: a request of ``max_model_len`` tokens would not fit; says how many bytes are
            missing and which length would fit.
    """
    groups = tuple(groups)
    block_bytes = KVCacheConfig(1, groups).block_bytes
    needed = blocks_for(groups, max_model_len, max_num_batched_tokens)
    num_blocks, decided_by = _num_blocks(
        profile,
        cache,
        block_bytes,
        on_cpu=device.split(":")[0] == "cpu",
        needed=needed,
        useful=CPU_USEFUL_ROUNDS * max_num_seqs * needed,
    )
    if num_blocks - 1 < needed:
        fits = _longest_that_fits(num_blocks - 1, groups, max_model_len, max_num_batched_tokens)
        raise CapacityError(_too_small(profile, block_bytes, num_blocks, needed, max_model_len,
                                       fits, decided_by))  # fmt: skip
    _check_limit(profile, num_blocks * block_bytes, cache.max_memory_bytes)
    return CachePlan(
        config=KVCacheConfig(num_blocks, groups),
        weights=profile.weights,
        activations=profile.activations,
        available=profile.available,
        decided_by=decided_by,
        max_model_len=max_model_len,
        blocks_per_request=needed,
        largest_batch=(num_blocks - 1) // needed,
    )


def fit_max_model_len(
    profile: MemoryProfile,
    groups: Sequence[KVCacheGroup],
    cache: CacheConfig,
    *,
    limit: int,
    device: str,
    max_num_batched_tokens: int | None = None,
) -> int:
    """The longest context, up to ``limit``, of which one request fits (``max_model_len = -1``).

    Raises:
        CapacityError: not even one token fits.
    """
    groups = tuple(groups)
    block_bytes = KVCacheConfig(1, groups).block_bytes
    needed = blocks_for(groups, limit, max_num_batched_tokens)
    num_blocks, decided_by = _num_blocks(
        profile, cache, block_bytes, on_cpu=device.split(":")[0] == "cpu", needed=needed,
        useful=needed,
    )  # fmt: skip
    fits = _longest_that_fits(num_blocks - 1, groups, limit, max_num_batched_tokens)
    if fits < 1:
        raise CapacityError(
            _too_small(profile, block_bytes, num_blocks, blocks_for(groups, 1), 1, 0, decided_by)
        )
    return fits


def blocks_for(
    groups: Sequence[KVCacheGroup], num_tokens: int, max_num_batched_tokens: int | None = None
) -> int:
    """Blocks, over all groups, that a request of that length holds at most at once.

    Encoder states count in full: how many a request has, its text does not say.
    """
    total = 0
    for group in groups:
        size = group.spec.block_size
        length = num_tokens
        if isinstance(group.spec, CrossAttentionSpec):
            length = group.spec.max_encoder_tokens
        blocks = -(-length // size)
        if isinstance(group.spec, SlidingWindowSpec) and max_num_batched_tokens is not None:
            # The window before a step and the step's own tokens, at the worst alignment.
            at_once = group.spec.sliding_window - 1 + max_num_batched_tokens
            blocks = min(blocks, -(-at_once // size) + 1)
        total += blocks
    return total


def _num_blocks(
    profile: MemoryProfile,
    cache: CacheConfig,
    block_bytes: int,
    *,
    on_cpu: bool,
    needed: int,
    useful: int,
) -> tuple[int, str]:
    """Blocks with the null block, and what decided."""
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override + 1, "num_gpu_blocks_override"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    if cache.max_memory_bytes is not None:
        share, by = cache.max_memory_bytes, "max_memory_bytes"
    else:
        share = int(profile.available * cache.gpu_memory_utilization)
        by = f"gpu_memory_utilization {cache.gpu_memory_utilization:g}"
    left = share - profile.weights - profile.activations
    choices = [(left // block_bytes, by)]
    if on_cpu:
        capped = max(CPU_CACHE_BYTES // block_bytes, needed + 1)
        choices.append((capped, f"the {_size(CPU_CACHE_BYTES)} default on a CPU"))
        choices.append((useful + 1, f"need ({CPU_USEFUL_ROUNDS} full batches)"))
    return min(choices, key=lambda choice: choice[0])


def _check_limit(profile: MemoryProfile, cache: int, limit: int | None) -> None:
    needed = profile.weights + profile.activations + cache
    if limit is not None and needed > limit:
        raise CapacityError(
            f"max_memory_bytes = {limit}: weights ({_size(profile.weights)}), activations "
            f"({_size(profile.activations)}) and KV cache ({_size(cache)}) take {needed} bytes; "
            "give it more, or use fewer max_num_batched_tokens or a smaller cache"
        )


def _longest_that_fits(
    usable: int,
    groups: Sequence[KVCacheGroup],
    limit: int,
    max_num_batched_tokens: int | None,
) -> int:
    """Bisection over the length; 0 if not even one token fits."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(groups, middle, max_num_batched_tokens) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def _too_small(
    profile: MemoryProfile,
    block_bytes: int,
    num_blocks: int,
    needed: int,
    max_model_len: int,
    fits: int,
    decided_by: str,
) -> str:
    missing = (needed + 1 - num_blocks) * block_bytes
    advice = (
        f"max_model_len of at most {fits} would fit; or raise kv_cache_memory_bytes, "
        f"max_memory_bytes or gpu_memory_utilization"
        if fits
        else "no context fits at all: free memory, use a smaller model or fewer "
        "max_num_batched_tokens"
    )
    return (
        f"the KV cache is too small for one request of max_model_len = {max_model_len}: it needs "
        f"{_size((needed + 1) * block_bytes)}, {missing} bytes more than there are (size by "
        f"{decided_by}; {_size(profile.available)} free at start, weights "
        f"{_size(profile.weights)}, activations {_size(profile.activations)}). {advice}"
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
