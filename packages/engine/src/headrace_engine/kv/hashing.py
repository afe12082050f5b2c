"""Names for the content of cache blocks: chained SHA-256 over a fixed byte encoding.

A block's digest covers its own token ids and, through its parent's digest, every token before it,
so equal digests mean equal prefixes. The encoding is part of the contract (two machines that share
a cache must agree) and is proven by a stored constant in the tests::

    root  = SHA-256("headrace-kv-1" | keys)
    block = SHA-256(parent | u32 n | n x u32 token id | keys)
    keys  = u32 count | count x (u32 length | UTF-8 bytes)

All integers are little-endian. Python's ``hash()`` is never used: it is salted per process and
collides on purpose-made input, which would show one user's cache to another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_core.multimodal import MediaInput
    from headrace_core.request import PromptEmbeds

_DOMAIN = b"headrace-kv-1"
_U32 = struct.Struct("<I")
_NO_KEYS = _U32.pack(0)
_PLAIN_ROOT = sha256(_DOMAIN + _NO_KEYS).digest()

MAX_TOKEN_ID = 2**32 - 1
"""Largest token id that the encoding can hold."""


def root_digest(extra_keys: Sequence[str] = ()) -> bytes:
    """Parent of a sequence's first block.

    Args:
        extra_keys: whatever must be equal for the whole sequence before blocks may be shared,
            such as the cache salt.
    """
    return sha256(_DOMAIN + _encode_keys(extra_keys)).digest() if extra_keys else _PLAIN_ROOT


def block_digest(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[str] = ()) -> bytes:
    """Digest of one full block.

    Args:
        parent: digest of the block before, or :func:`root_digest`; 32 bytes.
        token_ids: the block's tokens, each in 0..``MAX_TOKEN_ID``.
        extra_keys: what else the block's content depends on (hash of a media item, say).
    """
    tokens = _packing(len(token_ids))(len(token_ids), *token_ids)
    keys = _encode_keys(extra_keys) if extra_keys else _NO_KEYS
    return sha256(parent + tokens + keys).digest()


@cache
def _packing(num_tokens: int) -> Callable[..., bytes]:
    """Packs that number and so many tokens."""
    return struct.Struct(f"<{num_tokens + 1}I").pack


class BlockHashes:
    """Digests of one sequence's full blocks, each computed once, as its tokens become known.

    Args:
        block_size: tokens per block.
        cache_salt: of the sequence.
        embeds: the prompt's embeddings, if it came as such: content of its blocks, whatever the ids.
        media: what placeholders stand for: content of the blocks that hold some.
        adapter_digest: names the content of the adapter that computes the sequence; "": none does.
    """

    __slots__ = ("_block_size", "_embeds", "_media", "_root", "digests")

    def __init__(
        self,
        block_size: int,
        cache_salt: str | None,
        embeds: PromptEmbeds | None = None,
        media: Sequence[MediaInput] = (),
        adapter_digest: str = "",
    ) -> None:
        self._block_size = block_size
        self._embeds = embeds
        self._media = media
        salt = () if cache_salt is None else ("salt", cache_salt)
        self._root = root_digest((*salt, *(("adapter", adapter_digest) if adapter_digest else ())))
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> list[bytes]:
        """Digests of all full blocks of ``token_ids``, which must continue the earlier ones."""
        size, digests = self._block_size, self.digests
        count = len(token_ids) // size
        if count == len(digests):
            return digests
        parent = digests[-1] if digests else self._root
        starts = range(len(digests) * size, count * size, size)
        if self._embeds is None and not self._media:
            pack = _packing(size)
            for start in starts:  # block_digest without keys: hundreds of blocks are full in a step
                tokens = pack(size, *token_ids[start : start + size])
                parent = sha256(parent + tokens + _NO_KEYS).digest()
                digests.append(parent)
            return digests
        for start in starts:
            end = start + size
            parent = block_digest(parent, token_ids[start:end], self._keys(start, end))
            digests.append(parent)
        return digests

    def _keys(self, start: int, end: int) -> tuple[str, ...]:
        """Keys that tokens ``start`` to ``end`` depend on besides their ids."""
        content = self._embeds.digests(start, end) if self._embeds is not None else ""
        keys: tuple[str, ...] = ("embeds", content) if content else ()
        for item in self._media:
            if 0 <= item.offset < end and start < item.offset + item.num_tokens:
                # Where it begins says which part of it the block holds.
                keys += ("media", item.content_hash, str(item.offset - start))
        return keys


def _encode_keys(keys: Sequence[str]) -> bytes:
    parts = [_U32.pack(len(keys))]
    for key in keys:
        # Lone surrogates are possible in a salt that came as JSON; they must not raise here.
        encoded = key.encode("utf-8", "surrogatepass")
        parts += (_U32.pack(len(encoded)), encoded)
    return b"".join(parts)
