"""Policies of block tables, one for each kind of layer.

Letters: S tokens per block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headrace_core.errors import ConfigError
from headrace_core.kv import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MLASpec,
    RecurrentSpec,
    SlidingWindowSpec,
)


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Tokens that a lone request needs blocks for."""

    num_tokens: int
    num_encoder_tokens: int = 0
    max_step_tokens: int | None = None
    """Most of its tokens that one step computes; None: all."""
    caching: bool = False
    """True if it may find a prefix in the cache, or leave one."""


@dataclass(frozen=True, slots=True)
class CachePolicy(ABC):
    """One policy. Positions are those of tokens, indices those of a table's entries."""

    block_size: int

    @abstractmethod
    def first_visible(self, position: int) -> int:
        """Index of the first entry that a token at ``position``, or a later one, reads.

        Never falls as positions rise. A hit of so many tokens needs the entries from here to its
        end, and none before.
        """

    @abstractmethod
    def most_blocks(self, request: RequestSize) -> int:
        """Blocks that a request holds at its peak, if it is alone."""

    def blocks(self, num_tokens: int) -> int:
        """Entries for so many tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class FullAttentionPolicy(CachePolicy):
    """Every token stays visible: full attention, latent or not."""

    def first_visible(self, position: int) -> int:
        return 0

    def most_blocks(self, request: RequestSize) -> int:
        return self.blocks(request.num_tokens)


@dataclass(frozen=True, slots=True)
class WindowedPolicy(CachePolicy):
    """A token sees at most ``reach`` tokens before it: entries before them are freed."""

    reach: int

    def most_blocks(self, request: RequestSize) -> int:
        every = self.blocks(request.num_tokens)
        if request.max_step_tokens is None:
            return every
        # What is seen before the step, and the step's own, at the worst alignment.
        return min(every, self.blocks(self.reach + request.max_step_tokens) + 1)


@dataclass(frozen=True, slots=True)
class SlidingWindowPolicy(WindowedPolicy):
    """A window: itself and the ``reach`` tokens before."""

    def first_visible(self, position: int) -> int:
        return max(0, position - self.reach) // self.block_size


@dataclass(frozen=True, slots=True)
class ChunkedLocalPolicy(WindowedPolicy):
    """The tokens of its own chunk, of ``reach + 1`` tokens."""

    def first_visible(self, position: int) -> int:
        chunk = self.reach + 1
        return position // chunk * chunk // self.block_size


@dataclass(frozen=True, slots=True)
class RecurrentPolicy(CachePolicy):
    """The state that the token before has left."""

    def first_visible(self, position: int) -> int:
        return max(0, position - 1) // self.block_size

    def most_blocks(self, request: RequestSize) -> int:
        """One, and the one that is read while a request begins from a state of the cache."""
        return 1 + request.caching


@dataclass(frozen=True, slots=True)
class CrossAttentionPolicy(CachePolicy):
    """An encoder's states, all of them from the first token to the last."""

    def first_visible(self, position: int) -> int:
        return 0

    def most_blocks(self, request: RequestSize) -> int:
        return self.blocks(request.num_encoder_tokens)


def policy_of(group: KVCacheGroup) -> CachePolicy:
    """The kind of a group's layers.

    Raises:
        ConfigError: a spec of another class, or one whose size is none.
    """
    spec = group.spec
    if isinstance(spec, (FullAttentionSpec, MLASpec)):
        return FullAttentionPolicy(spec.block_size)
    if isinstance(spec, SlidingWindowSpec):
        _check(group, "sliding_window", spec.sliding_window)
        return SlidingWindowPolicy(spec.block_size, spec.sliding_window - 1)
    if isinstance(spec, ChunkedLocalSpec):
        _check(group, "attention_chunk_size", spec.attention_chunk_size)
        return ChunkedLocalPolicy(spec.block_size, spec.attention_chunk_size - 1)
    if isinstance(spec, RecurrentSpec):
        return RecurrentPolicy(spec.block_size)
    if isinstance(spec, CrossAttentionSpec):
        _check(group, "max_encoder_tokens", spec.max_encoder_tokens)
        return CrossAttentionPolicy(spec.block_size)
    served: tuple[type[CacheSpec], ...] = (
        FullAttentionSpec, MLASpec, SlidingWindowSpec, ChunkedLocalSpec, RecurrentSpec,
        CrossAttentionSpec,
    )  # fmt: skip
    raise ConfigError(
        f"KV cache: {type(spec).__name__} of layer {group.layer_names[0]!r} is not supported; "
        f"{', '.join(each.__name__ for each in served)} are"
    )


def _check(group: KVCacheGroup, name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(
            f"KV cache: {name} = {value} of layer {group.layer_names[0]!r}: must be at least 1"
        )
