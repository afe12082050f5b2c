"""Choices of texts, matched without a grammar library: the same for every backend.

Libraries turn ten thousand texts into rules or states by the ten thousand and give up, or take seconds.
Here the texts are sorted, and a place is the range of them that begin as the output does; a step looks at
what tells these texts apart within the length of one token.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace_core.grammar import Vocabulary, malformed

KEPT_MASKS = 256
"""Places of one choice whose masks are kept."""


class TokenTexts:
    """The tokens of a vocabulary by their bytes, special tokens left out."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.ids: dict[bytes, list[int]] = {}
        """Bytes -> all tokens that are these bytes."""
        for token_id, token in enumerate(vocabulary.tokens):
            if token and token_id not in vocabulary.special_token_ids:
                self.ids.setdefault(token, []).append(token_id)
        self._sorted = sorted(self.ids)

    @property
    def all(self) -> Tokens:
        """All tokens, of which no byte is read yet."""
        return Tokens(0, len(self._sorted), 0)

    def going_on(self, tokens: Tokens, byte: int) -> Tokens:
        """The tokens among these whose next byte is this one."""
        first, end, depth = tokens
        if first < end and len(self._sorted[first]) == depth:
            first += 1
        next_byte = itemgetter(depth)
        first = bisect_left(self._sorted, byte, first, end, key=next_byte)
        return Tokens(first, bisect_right(self._sorted, byte, first, end, key=next_byte), depth + 1)

    def exactly(self, tokens: Tokens) -> Sequence[int]:
        """Ids of the token that has no further byte, if it is among these."""
        token = self._sorted[tokens.first]
        return self.ids[token] if len(token) == tokens.depth else ()


class Tokens(NamedTuple):
    """Tokens ``first`` to ``end - 1`` in the order of their bytes: those that begin with the same so many
    bytes."""

    first: int
    end: int
    depth: int


class Place(NamedTuple):
    """Texts ``first`` to ``end - 1``, of which so many bytes are written."""

    first: int
    end: int
    depth: int


class ChoiceGrammar:
    """One of several texts.

    Args:
        source: JSON list of texts, all different.
        tokens: the vocabulary's.

    Raises:
        RequestError: a text holds a byte that no token is alone, so that it could not always be
            written to its end.
    """

    def __init__(self, source: str, tokens: TokenTexts) -> None:
        texts = [text.encode() for text in json.loads(source)]
        unknown = [byte for byte in sorted(set(b"".join(texts))) if bytes([byte]) not in tokens.ids]
        if unknown:
            raise malformed("choice", f"the tokenizer has no token for the byte {unknown[0]:#04x}")
        self.texts = sorted(texts)
        self.tokens = tokens
        self.mask = lru_cache(KEPT_MASKS)(self._mask)
        self.mask(self.start)

    @property
    def start(self) -> Place:
        """The place where nothing is written."""
        return Place(0, len(self.texts), 0)

    def matcher(self) -> ChoiceMatcher:
        return ChoiceMatcher(self)

    def complete(self, place: Place) -> bool:
        """True if a text is written whole; it stands before all longer ones that begin with it."""
        return len(self.texts[place.first]) == place.depth

    def after(self, place: Place, token: bytes) -> Place | None:
        """The place behind a token; None: no text goes on with it."""
        written = itemgetter(slice(place.depth, place.depth + len(token)))
        first = bisect_left(self.texts, token, place.first, place.end, key=written)
        end = bisect_right(self.texts, token, first, place.end, key=written)
        return Place(first, end, place.depth + len(token)) if first < end else None

    def _mask(self, place: Place) -> npt.NDArray[np.int32]:
        """[ceil(V / 32)] int32."""
        vocabulary = self.tokens.vocabulary
        allowed = np.zeros(vocabulary.num_words * 32, np.uint8)
        allowed[self._allowed(place)] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def _allowed(self, place: Place) -> list[int]:
        """Tokens with which one of the texts goes on."""
        found: list[int] = []
        pending = [(place, self.tokens.all)]
        while pending:
            (first, end, depth), tokens = pending.pop()
            if len(self.texts[first]) == depth:  # it ends here; the others go on
                first += 1
            while first < end and tokens.first < tokens.end:
                byte = self.texts[first][depth]
                if self.texts[end - 1][depth] == byte:
                    behind = end
                else:
                    behind = bisect_right(self.texts, byte, first, end, key=itemgetter(depth))
                going_on = self.tokens.going_on(tokens, byte)
                if going_on.first < going_on.end:
                    found += self.tokens.exactly(going_on)
                    pending.append((Place(first, behind, depth + 1), going_on))
                first = behind
        return found


class ChoiceMatcher:
    """One request's place: those that it has been in."""

    def __init__(self, grammar: ChoiceGrammar) -> None:
        self._grammar = grammar
        self._places = [grammar.start]

    def fill_bitmask(self, bitmask: npt.NDArray[np.int32], row: int) -> None:
        bitmask[row] = self._grammar.mask(self._places[-1])

    def advance(self, token_ids: Sequence[int]) -> bool:
        vocabulary, places = self._grammar.tokens.vocabulary, self._places[-1:]
        for token_id in token_ids:
            inside = 0 <= token_id < vocabulary.size
            is_text = inside and token_id not in vocabulary.special_token_ids
            token = vocabulary.tokens[token_id] if is_text else b""
            place = self._grammar.after(places[-1], token) if token else None
            if place is None:
                return False
            places.append(place)
        self._places += places[1:]
        return True

    def roll_back(self, num_tokens: int) -> None:
        if num_tokens:
            del self._places[-num_tokens:]

    @property
    def complete(self) -> bool:
        return self._grammar.complete(self._places[-1])

    @property
    def terminated(self) -> bool:
        place = self._places[-1]
        return self.complete and place.end - place.first == 1

    @property
    def failure(self) -> str:
        return ""
