"""Dividing one budget of bytes among the pools of a cache.

Each pool gets what one request of the longest context needs. Of what is left, states get at most half:
one for each sequence that may run, as many again where prefixes are cached, and spare ones. The rest goes
to blocks of tokens, so that every pool of them holds equally many of the longest requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_core.kv import CrossAttentionSpec, KVCacheConfig, KVCacheGroup, RecurrentSpec
from headrace_engine.config import EngineConfig
from headrace_engine.kv.policies import RequestSize, policy_of
from headrace_engine.kv.spare_states import spare_states


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """Blocks that a pool needs, null blocks not counted."""

    block_bytes: int
    needed: int
    """That one request of the longest context holds at its peak."""
    held: int
    """That each such request holds when many run."""
    most: int | None = None
    """More are of little use; None: more hold more tokens."""

    @property
    def least_bytes(self) -> int:
        """With which that one request can run."""
        return (self.needed + 1) * self.block_bytes


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Settings that the number of blocks depends on, beside the model."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None = None
    """Most tokens of a step; known, it bounds what windows and chunks hold. None: every token."""
    caching: bool = False
    """True if prefixes are cached."""
    spare_states: int = 0
    """Spare blocks of each group of recurrent layers, while guesses are checked."""
    most_behind: int = 0
    """Tokens by which a request's recurrent states may be behind what is computed of it."""

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> CacheLimits:
        """The limits in an engine's settings."""
        num_seqs = config.scheduler.max_num_seqs or 1
        num_drafts = config.speculative.num_drafts
        return cls(
            max_model_len,
            num_seqs,
            config.scheduler.max_num_batched_tokens,
            caching=config.cache.enable_prefix_caching is not False,
            spare_states=spare_states(num_drafts, num_seqs),
            most_behind=num_drafts,
        )


def pool_needs(groups: Sequence[KVCacheGroup], limits: CacheLimits) -> list[PoolNeed]:
    """By pool. Encoder states count in full: how many a request has, its text does not say."""
    are_states = [isinstance(group.spec, RecurrentSpec) for group in groups]
    only_states = all(are_states)
    if limits.max_num_batched_tokens is not None and any(are_states):
        step_tokens = limits.max_num_batched_tokens + limits.most_behind
        limits = dataclasses.replace(limits, max_num_batched_tokens=step_tokens)
    config = KVCacheConfig((0,) * (1 + max(group.pool for group in groups)), tuple(groups))
    needs = []
    for pool in range(len(config.pools)):
        inside = [groups[g] for g in config.groups_of(pool)]
        needed = sum(_most_blocks(group, limits) for group in inside)
        held, most = needed, None
        if isinstance(inside[0].spec, RecurrentSpec):
            held, spare = len(inside), len(inside) * limits.spare_states
            needed += spare
            if not only_states:
                most = max(needed, held * limits.max_num_seqs * (1 + limits.caching) + spare)
        needs.append(PoolNeed(config.block_bytes(pool), needed, held, most))
    return needs


def least_bytes(needs: Sequence[PoolNeed]) -> int:
    """With which one request of the longest context can run."""
    return sum(need.least_bytes for need in needs)


def useful_bytes(needs: Sequence[PoolNeed], num_requests: int) -> int:
    """Bytes that so many of the longest requests use, and as many states as are of use."""
    blocks = (num_requests * need.needed if need.most is None else need.most for need in needs)
    return sum((count + 1) * need.block_bytes for count, need in zip(blocks, needs))


def divide(needs: Sequence[PoolNeed], num_bytes: int) -> tuple[int, ...]:
    """Blocks of each pool, the null block included.

    With fewer bytes than :func:`least_bytes` some pool gets less than it needs.
    """
    least, num_bytes = least_bytes(needs), max(0, num_bytes)
    if num_bytes < least:
        return tuple(num_bytes * (need.needed + 1) // least for need in needs)
    blocks = [need.needed + 1 for need in needs]
    rest = num_bytes - least
    wanted = [0 if need.most is None else need.most - need.needed for need in needs]
    states = sum(count * need.block_bytes for count, need in zip(wanted, needs))
    allowed = min(rest // 2, states)
    for pool, count in enumerate(wanted):
        if count:
            more = count * allowed // states
            blocks[pool] += more
            rest -= more * needs[pool].block_bytes
    one_more = sum(need.needed * need.block_bytes for need in needs if need.most is None)
    for pool, need in enumerate(needs):
        if need.most is None:
            blocks[pool] += rest * need.needed // one_more
    return tuple(blocks)


def _most_blocks(group: KVCacheGroup, limits: CacheLimits) -> int:
    spec = group.spec
    states = spec.max_encoder_tokens if isinstance(spec, CrossAttentionSpec) else 0
    request = RequestSize(
        limits.max_model_len, states, limits.max_num_batched_tokens, limits.caching
    )
    return policy_of(group).most_blocks(request)
