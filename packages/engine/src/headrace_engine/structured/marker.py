"""The text after which a constraint begins to hold: the end of the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from headrace_core.grammar import Vocabulary


class MarkerTokens:
    """Tokens that end a marker and go on behind it.

    Args:
        marker: not empty.
        vocabulary: looked through once for each beginning of the marker that an output ends with.
    """

    def __init__(self, marker: bytes, vocabulary: Vocabulary) -> None:
        self.marker = marker
        self._vocabulary = vocabulary
        self.going_on = cache(self._going_on)

    def begun(self, tail: bytes) -> list[int]:
        """Lengths of the marker's beginnings with which a text ends; 0 is one of them."""
        return [k for k in range(len(self.marker)) if tail.endswith(self.marker[:k])]

    def _going_on(self, begun: int) -> Sequence[tuple[int, bytes]]:
        """(token, its bytes behind the marker) of the tokens that end the marker of which so many
        bytes are there, and have more."""
        rest, found = self.marker[begun:], []
        for token_id, token in enumerate(self._vocabulary.tokens):
            at = 0 if begun and token.startswith(rest) else -1 if begun else token.find(rest)
            if at >= 0 and len(token) > at + len(rest):
                found.append((token_id, token[at + len(rest) :]))
        return found


class MarkerGate:
    """Watches one output for the marker.

    Args:
        tokens: the marker's.
        vocabulary: for the bytes of tokens.
        accepts: whether a text may begin what the constraint holds for.
    """

    def __init__(
        self, tokens: MarkerTokens, vocabulary: Vocabulary, accepts: Callable[[bytes], bool]
    ) -> None:
        self._tokens = tokens
        self._vocabulary = vocabulary
        self._accepts = cache(accepts)
        self._tail = b""

    def feed(self, token_id: int) -> bytes | None:
        """Take a token; the text behind the marker if it is there now, else None."""
        marker = self._tokens.marker
        text = self._tail + self._vocabulary.tokens[token_id]
        at = text.find(marker)
        if at >= 0:
            return text[at + len(marker) :]
        self._tail = text[max(0, len(text) - len(marker) + 1) :]
        return None

    def forbidden(self) -> list[int]:
        """Tokens that would end the marker and go on with what the constraint does not allow."""
        return [
            token_id
            for begun in self._tokens.begun(self._tail)
            for token_id, behind in self._tokens.going_on(begun)
            if not self._accepts(behind)
        ]
