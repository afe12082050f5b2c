"""What a scheduler needs of a KV-cache manager, and the manager of a request.

No torch: blocks are counted here, the worker holds the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from headrace_core.multimodal import MediaInput
    from headrace_core.request import PromptEmbeds

BlockIds = tuple[list[int], ...]
"""Block ids by group."""
NextBlocks = tuple[BlockIds | None, int, int]
"""Results of :meth:`KVCacheManager.allocate` for one token and of :meth:`KVCacheManager.quiet_until` then."""


class CachedSequence(Protocol):
    """A request as a KV-cache manager sees it."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and known output tokens. Append-only, but for a reset to a longer prompt."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are cached, or will be when the steps in flight end."""
        ...

    @property
    def num_settled_tokens(self) -> int:
        """Tokens that are computed even if every guess that steps in flight check is wrong: what they see
        must not be given up. :attr:`num_computed_tokens` counts all guesses as right."""
        ...

    @property
    def cache_salt(self) -> str | None:
        """Requests share cached blocks only with equal salts."""
        ...

    @property
    def adapter_digest(self) -> str:
        """Names the content of the adapter that computes the request; "": none does. Requests share cached
        blocks only with equal ones."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if the request must compute its whole prompt (prompt log-probabilities, results of
        pooling that need every token)."""
        ...

    @property
    def prompt_embeds(self) -> PromptEmbeds | None:
        """The prompt's embeddings if it came so: its ids mean nothing, its rows' digests do."""
        ...

    @property
    def media(self) -> Sequence[MediaInput]:
        """Media behind the prompt's placeholders: the placeholder ids have no meaning, the contents do."""
        ...

    @property
    def num_encoder_tokens(self) -> int:
        """Encoder states of the request, for groups of cross-attention layers."""
        ...


class CachedBlock(NamedTuple):
    """A block's content, and where it is."""

    group: int
    block_id: int
    digest: bytes


class PrefixMatch(NamedTuple):
    """Longest cached prefix of a request. Holds no references; valid until the next allocation."""

    num_tokens: int
    """A multiple of the block size, and less than the request's number of tokens."""
    block_ids: BlockIds


class KVCacheStats(NamedTuple):
    """Counters since the last reset of the statistics."""

    queries: int
    """Prompt tokens that were looked up."""
    hits: int
    """Tokens found, out of those queried."""


class KVCacheManager(ABC):
    """Hands out blocks. Imports no torch: it counts, the worker holds the memory.

    Invariant: block tables are append-only while a request runs, except that entries which no later
    token reads (before a sliding window or a chunk, states that were passed) become
    :data:`NULL_BLOCK`; the block of a state that is not kept moves on to a later entry. Every block
    is, at any time, in exactly one of three conditions: referenced by at least one request; free and
    cached (evictable, least recently used first); free and empty. Pools are counted one by one: a
    request has room only if each of them has room for it.
    """

    @abstractmethod
    def match_prefix(self, sequence: CachedSequence) -> PrefixMatch:
        """Find the longest cached prefix, leaving at least one token to compute."""

    @abstractmethod
    def allocate(
        self, sequence: CachedSequence, num_new_tokens: int, match: PrefixMatch | None = None
    ) -> BlockIds | None:
        """Make room for ``num_new_tokens`` after ``num_computed_tokens`` (plus the match).

        Args:
            sequence: the request. ``num_computed_tokens`` does not yet include the match.
            num_new_tokens: at least 1. Asking again within a step, from the same
                ``num_computed_tokens``, extends what was given.
            match: only at the first allocation of a request; its blocks are referenced first.

        Returns:
            The ids that the request's block table gains, by group, the match's included; None,
            with nothing changed, if a pool has too few free blocks.

        Blocks that this call fills with *known* tokens become visible to :meth:`match_prefix` at
        once: within a step all keys and values are written before any attention reads them. States
        are read as they are written, so that one is visible only after the step which leaves it.
        """

    def allocate_each(self, sequences: Iterable[CachedSequence]) -> Iterator[NextBlocks]:
        """:meth:`allocate` one token for each of several requests that hold blocks. A request's turn comes
        when its result is asked for: what happens between two turns is seen by the later one."""
        for sequence in sequences:
            gained = self.allocate(sequence, 1)
            yield gained, *self.quiet_until(sequence.request_id)

    def snapshot_at(self, sequence: CachedSequence, num_computed_tokens: int) -> int:
        """Number of tokens, above ``num_computed_tokens``, after which a step should end so that the
        state which it leaves can serve other requests; 0 = anywhere. Never needed for correctness."""
        return 0

    def quiet_until(self, request_id: str) -> tuple[int, int]:
        """Number of a request's tokens up to which :meth:`allocate` gives it nothing and changes nothing, and
        the same as long as the last of the tokens that are asked for is not known yet; 0 = not known."""
        return 0, 0

    @abstractmethod
    def block_ids(self, request_id: str) -> BlockIds:
        """The request's block table, by group."""

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Drop the request's references, last block first. Unknown ids are ignored."""

    @abstractmethod
    def fits(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """True if a request of that length could run alone in empty pools."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks; False, with nothing changed, while any block is in use."""

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Let :meth:`match_prefix` find nothing that was computed, or begun, until now: the weights are
        others. Requests keep the blocks that they hold, and what they add to them is never found."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks that can be handed out, over all pools (null blocks not counted)."""

    @property
    @abstractmethod
    def num_free_blocks(self) -> int:
        """Blocks that no request references."""

    @property
    def usage(self) -> float:
        """Share of the blocks that requests reference, 0 to 1; of the fullest pool, if there are
        several."""
        return (self.num_blocks - self.num_free_blocks) / max(1, self.num_blocks)

    @abstractmethod
    def take_stats(self) -> KVCacheStats:
        """Prefix-cache counters since the last call."""
