"""Needs of layers from the paged cache, and how its blocks lie in memory.

Letters: N blocks, S tokens per block (``block_size``), Hk key-value heads, D ``head_dim``.

A model's layers that cache something are sorted into *groups*: layers of one group share a block
table. Groups whose pages have the same size draw from one *pool* of blocks; one budget is divided
among the pools. Within a group the j-th layer uses its pool's tensor j, so a pool has as many tensors
as its largest group has layers, and a block id is meaningful in all of them; it belongs to exactly
one group of the pool at a time.

A recurrent layer caches no tokens but a state of fixed size. Its page is one state, and the table of
its group has, as every other, an entry for each block of tokens: entry i holds the state after the
last token that was computed of block i, if it is still wanted, else the null block. A step from token
``computed`` to ``end`` begins from entry ``(computed - 1) // S`` and leaves what it has come to in entry
``(end - 1) // S``, often in the same block; entries in between are null. A state that was left exactly
at the end of a block of tokens, a *snapshot*, may be kept for requests with the same prefix: who
begins from one writes to another block, so nothing is ever copied.

Block 0 is never handed out: it is the *null block*, which stands in a block table where a
sliding window has passed, and where padding writes go.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

NULL_BLOCK = 0
"""Block id that holds nothing; see the module's docstring."""

STATE_ALIGNMENT = 64
"""Bytes; see :class:`RecurrentSpec`."""

PAD_SLOT = -1
"""Entry of a slot mapping whose token is not written anywhere."""

_ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int8_per_token_head": 1,
    "int4_per_token_head": 1,
}

ROW_SCALED_BITS: Mapping[str, int] = {"int8_per_token_head": 8, "int4_per_token_head": 4}
"""Storages whose rows (one token's numbers of one head) bring their own scale -> bits of a number."""
ROW_SCALE_BYTES = 4

CACHE_DTYPES: Mapping[str, str] = {
    "auto": "",
    "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
    **{name: name for name in ROW_SCALED_BITS},
}
"""Values of ``cache.kv_cache_dtype`` -> :attr:`KVCacheSpec.dtype`; empty = the activations'.

``int8`` is of no use without scales that suit the model (:mod:`headrace_core.attention`).
"""


@dataclass(frozen=True, slots=True)
class CacheSpec(ABC):
    """Cache contents of one layer. Cost: ``page_bytes`` per block and layer."""

    block_size: int
    """Tokens for which a block table has one entry."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""


@dataclass(frozen=True, slots=True)
class KVCacheSpec(CacheSpec):
    """Values that one attention layer stores for each token."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    """``float32``, ``float16``, ``bfloat16``, ``float8_e4m3``, ``float8_e5m2``, ``int8`` or one of
    :data:`ROW_SCALED_BITS`."""

    ranks: int = 1
    """Ranks that share a block's tokens, each with a page for ``block_size / ranks`` of them."""

    scales_per_row: ClassVar[int] = 1
    rows_per_token: ClassVar[int] = 2

    @property
    def row_scales(self) -> int:
        """Scales behind a row, the numbers of one token and head: float32."""
        return self.scales_per_row if self.dtype in ROW_SCALED_BITS else 0

    @property
    def row_numbers(self) -> int:
        """Entries of the cache for a row's numbers."""
        return self.head_dim * ROW_SCALED_BITS.get(self.dtype, 8) // 8

    @property
    def row_width(self) -> int:
        """The same with the row's scales, which are aligned to their size."""
        scales, size = self.row_scales, ROW_SCALE_BYTES
        return (-(-self.row_numbers // size) + scales) * size if scales else self.row_numbers

    @property
    def page_tokens(self) -> int:
        """Tokens of one block on this rank."""
        return self.block_size // self.ranks

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values together."""
        rows = self.rows_per_token * self.page_tokens * self.num_kv_heads
        return rows * self.row_width * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token stays visible: ``ceil(num_tokens / block_size)`` blocks per request."""


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(KVCacheSpec):
    """A query at p sees keys j with ``p - j < sliding_window``; blocks wholly before are freed."""

    sliding_window: int = 0


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(KVCacheSpec):
    """A query at p sees keys j <= p of its own chunk: ``j // attention_chunk_size`` is
    ``p // attention_chunk_size``. Blocks wholly before a chunk are freed as it begins."""

    attention_chunk_size: int = 0


@dataclass(frozen=True, slots=True)
class MLASpec(KVCacheSpec):
    """One vector for each token from which keys and values of all heads are made: the compressed
    latent, then the rotated key that heads share. ``num_kv_heads`` is 1, ``head_dim`` the length of
    both together. Blocks as :class:`FullAttentionSpec`."""

    # Of the latent, which is normed, and of the rotated key, which may be many times as large.
    scales_per_row: ClassVar[int] = 2
    rows_per_token: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class SparseIndexerSpec(MLASpec):
    """One key for each token, by which an indexer picks the tokens that latent attention attends to.
    ``head_dim`` is its length. Laid out, shared and kept as latents are."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor of a recurrent layer's state."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RecurrentSpec(CacheSpec):
    """A state of fixed size for each request; see the module's docstring."""

    states: tuple[StateShape, ...]
    """Parts of the state (inputs of a convolution, a matrix for each head, ...)."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one state, each tensor of it rounded up to :data:`STATE_ALIGNMENT`."""
        sizes = (state.num_bytes for state in self.states)
        return sum(-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes)


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec(KVCacheSpec):
    """Keys and values of an encoder's states: ``ceil(num_encoder_tokens / block_size)`` blocks per
    request, taken with its first tokens, never shared."""

    max_encoder_tokens: int = 0
    """Most states of one request."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share a block table."""

    layer_names: tuple[str, ...]
    spec: CacheSpec
    pool: int = 0
    """Index of the pool that its blocks are from."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The whole cache as it will be allocated."""

    pools: tuple[int, ...]
    """Blocks of each pool, the null block included."""
    groups: tuple[KVCacheGroup, ...]
    """Empty for a model that caches nothing, which has no pools either."""

    @property
    def block_size(self) -> int:
        """Tokens per entry of a block table, equal in all groups; 0 without any."""
        return self.groups[0].spec.block_size if self.groups else 0

    def groups_of(self, pool: int) -> tuple[int, ...]:
        """Indices of the groups that draw from a pool."""
        return tuple(g for g, group in enumerate(self.groups) if group.pool == pool)

    def num_tensors(self, pool: int) -> int:
        """Number of a pool's cache tensors; see the module's docstring."""
        return max(len(self.groups[g].layer_names) for g in self.groups_of(pool))

    def page_bytes(self, pool: int) -> int:
        """Bytes of one block in one of a pool's tensors."""
        return max(self.groups[g].spec.page_bytes for g in self.groups_of(pool))

    def block_bytes(self, pool: int) -> int:
        """Bytes that one block of a pool takes over all of its tensors."""
        return self.num_tensors(pool) * self.page_bytes(pool)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools together."""
        return sum(count * self.block_bytes(pool) for pool, count in enumerate(self.pools))


class KVConnector(ABC):
    """A store of blocks outside the pools. The object behind an entry point of ``headrace.kv_connectors`` is
    a subclass. An engine makes one: its own thread calls :meth:`contains`, its worker's the rest. A key is
    32 bytes, made of everything that a block's content depends on. ``settings`` are
    ``cache.kv_transfer_config``, checked; raises ConfigError naming what is wrong in them.
    """

    saves_full_blocks: bool = True
    """Blocks are offered as they become full; False: as a pool gives them up."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = settings

    @abstractmethod
    def contains(self, key: bytes) -> bool:
        """True if a block is there. Does not wait for one to come."""

    @abstractmethod
    def load(self, key: bytes, into: memoryview) -> bool:
        """Copy a block; False: it is gone, or not what was saved, and is not found again. Raises OSError."""

    @abstractmethod
    def save(self, key: bytes, content: memoryview) -> None:
        """Keep a copy of a block, if it is not there. Raises OSError."""

    def fetch(
        self, request_id: str, blocks: Mapping[bytes, int], params: Mapping[str, Any]
    ) -> bool:
        """Bring blocks (key -> bytes) near that a request needs, beside the steps. True: ask again, they are
        on their way. ``params``: its ``kv_transfer_params``, which may name a peer (``remote_host``,
        ``remote_port``, ``remote_engine_id``). Called by the engine's own thread, as the next two."""
        return False

    def forget(self, request_id: str) -> None:  # noqa: B027 - most fetch nothing
        """A request waits no longer: nothing need be fetched for it."""

    def address(self) -> Mapping[str, Any]:
        """``remote_*`` parameters by which another engine finds what is saved here; {}: it needs none."""
        return {}

    def check_block(self, num_bytes: int) -> None:  # noqa: B027 - most keep any
        """Called at start. Raises ConfigError: a block of so many bytes, the largest, could not be kept."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Let go of what it holds, once what is on its way is kept. Idempotent."""
