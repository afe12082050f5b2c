"""Spare states of recurrent layers, in which guesses are checked
(:mod:`headrace_engine.speculation.state_turns`): the last blocks of each pool, which the scheduler does not
hand out."""

from __future__ import annotations

from headrace_core.kv import KVCacheConfig
from headrace_engine.kv.states import state_groups

MOST_SPARE_STATES = 8
"""Requests whose guesses are checked at a time, at most: guesses pay while few requests run."""


def spare_states(num_drafts: int, max_num_seqs: int) -> int:
    """Spare blocks of each group of recurrent layers; 0 if nothing is guessed."""
    return min(max_num_seqs, MOST_SPARE_STATES) if num_drafts else 0


def without_spares(config: KVCacheConfig, count: int) -> KVCacheConfig:
    """The cache as the scheduler may hand it out: each pool's last blocks are the spare ones."""
    sizes = list(config.pools)
    for group in state_groups(config):
        sizes[config.groups[group].pool] -= count
    return KVCacheConfig(tuple(sizes), config.groups)


def first_spares(config: KVCacheConfig, count: int) -> dict[int, int]:
    """By group: its first spare block."""
    ends, found = list(without_spares(config, count).pools), {}
    for group in state_groups(config):
        pool = config.groups[group].pool
        found[group], ends[pool] = ends[pool], ends[pool] + count
    return found
