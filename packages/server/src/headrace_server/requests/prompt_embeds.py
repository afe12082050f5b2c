"""``prompt_embeds`` of a completion: base64 texts to bytes, bounded before they are decoded.

What the bytes hold is for the engine to look at, in a process that can be killed; here they stay
bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from headrace_core.errors import RequestError, UnsupportedFeature

_PIECE = 1 << 18
"""Characters of base64 that are decoded in one call; a multiple of 4."""
MAX_BYTES = 64 * 1024 * 1024
"""All embeddings of one request together, decoded."""


def decode_embeds(given: str | Sequence[str] | None, *, enabled: bool) -> list[bytes]:
    """The embeddings of each prompt, as the bytes of a safetensors or torch file.

    Args:
        enabled: whether the engine takes embeddings.

    Raises:
        RequestError: they are switched off, too large or no base64.
    """
    if given is None:
        return []
    if not enabled:
        raise UnsupportedFeature(
            "prompt_embeds: this server accepts no embeddings; start it with --enable-prompt-embeds",
            param="prompt_embeds",
        )
    texts = [given] if isinstance(given, str) else list(given)
    if sum(map(len, texts)) > MAX_BYTES * 4 // 3 + 4 * len(texts):
        raise RequestError(
            f"prompt_embeds: more than {MAX_BYTES} bytes in one request", param="prompt_embeds"
        )
    return [_decode(position, text) for position, text in enumerate(texts)]


def _decode(position: int, text: str) -> bytes:
    """In pieces, as each call keeps other threads waiting."""
    try:
        pieces = [_exactly(text[at : at + _PIECE]) for at in range(0, len(text) - _PIECE, _PIECE)]
        last = len(pieces) * _PIECE
        return b"".join([*pieces, base64.b64decode(text[last:], validate=True)])
    except (binascii.Error, ValueError):
        raise RequestError(
            f"prompt_embeds[{position}]: must be base64 without other characters",
            param="prompt_embeds",
        ) from None


def _exactly(piece: str) -> bytes:
    """A piece that others follow: without padding."""
    data = base64.b64decode(piece, validate=True)
    if len(data) * 4 != len(piece) * 3:
        raise ValueError("padding in the middle")
    return data
