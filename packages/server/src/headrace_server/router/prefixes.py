"""The beginnings of prompts that servers have seen.

A prompt's text is cut into pieces of 128 bytes; each has a hash that covers all pieces before it, too. What
two prompts have in common at their beginning is then as many equal hashes. The text is that of the request's
body, before any template: nothing is tokenized, and no model need be known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

PIECE_BYTES = 128
MAX_PIECES = 2048
"""Pieces of one prompt that count: 256 KiB."""
Score = tuple[float, ...]
"""How much of a prompt a server has; larger is more."""


class PrefixKnowledge(Protocol):
    """Knows how much of a prompt each server has cached."""

    async def scores(self, prompt: PromptText, servers: Sequence[str]) -> list[Score]:
        """For each server, how much of the prompt it has; scores of one call can be compared."""
        ...

    def sent(self, prompt: PromptText, server: str) -> None:
        """A request with this prompt goes to the server."""
        ...

    def forget(self, server: str) -> None:
        """The server has begun anew, or is gone."""
        ...


class PromptText:
    """The beginning of a request, as far as prefixes go.

    Args:
        text: what becomes the prompt, in its order.
        scope: prompts have nothing in common unless this is equal: model, path, salt.
        path: of the request.
        body: the request's.
    """

    __slots__ = ("_hashes", "_scope", "_text", "authorization", "body", "path")

    def __init__(self, text: bytes, scope: bytes = b"", path: str = "", body: bytes = b"") -> None:
        self._text = text
        self._scope = scope
        self._hashes: list[bytes] | None = None
        self.path = path
        self.body = body
        self.authorization = b""
        """The client's key, as its header has it."""

    @property
    def hashes(self) -> list[bytes]:
        """Of each whole piece, with all before it; 8 bytes."""
        if self._hashes is None:
            state = blake2b(self._scope, digest_size=8)
            found = []
            end = min(len(self._text), MAX_PIECES * PIECE_BYTES)
            for start in range(0, end - PIECE_BYTES + 1, PIECE_BYTES):
                state.update(self._text[start : start + PIECE_BYTES])
                found.append(state.digest())
            self._hashes = found
        return self._hashes


class SentPrefixes:
    """See :class:`PrefixKnowledge`: a server has what was sent there, the latest of it.

    Args:
        most: pieces that are remembered for each server; the ones used longest ago go.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[str, OrderedDict[bytes, None]] = {}

    async def scores(self, prompt: PromptText, servers: Sequence[str]) -> list[Score]:
        """See :meth:`PrefixKnowledge.scores`: the number of pieces."""
        return [(float(self.num_seen(prompt, server)),) for server in servers]

    def num_seen(self, prompt: PromptText, server: str) -> int:
        """Pieces of the prompt, from its beginning, that the server has seen."""
        seen = self._seen.get(server)
        if not seen:
            return 0
        for index, piece in enumerate(prompt.hashes):
            if piece not in seen:
                return index
        return len(prompt.hashes)

    def sent(self, prompt: PromptText, server: str) -> None:
        """See :meth:`PrefixKnowledge.sent`."""
        seen = self._seen.setdefault(server, OrderedDict())
        # From the end: a prompt's first pieces are used last, and go last. Others may share them.
        for piece in reversed(prompt.hashes):
            seen[piece] = None
            seen.move_to_end(piece)
        while len(seen) > self._most:
            seen.popitem(last=False)

    def forget(self, server: str) -> None:
        """See :meth:`PrefixKnowledge.forget`."""
        self._seen.pop(server, None)
