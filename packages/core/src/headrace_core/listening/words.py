"""Words out of tokens, as Whisper's authors find them (github.com/openai/whisper, ``tokenizer.py``)."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import NamedTuple

from headrace_core.listening.joining import UNSPACED

_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"


class TokenWord(NamedTuple):
    """Tokens ``begin`` to ``end`` of a clip are one word."""

    text: str
    begin: int
    end: int


def words_of(pieces: Sequence[TokenWord], language: str | None) -> list[TokenWord]:
    """Group tokens into words, punctuation with the word that it belongs to.

    Args:
        pieces: tokens, those that hold parts of a character together.
        language: in those without spaces each piece is a word.
    """
    words = pieces if language in UNSPACED else _split_at_spaces(pieces)
    return _with_punctuation(words)


def _split_at_spaces(pieces: Sequence[TokenWord]) -> list[TokenWord]:
    found: list[TokenWord] = []
    for piece in pieces:
        begins = piece.text.startswith(" ") or piece.text.strip() in string.punctuation
        if not found or begins:
            found.append(piece)
        else:
            last = found.pop()
            found.append(TokenWord(last.text + piece.text, last.begin, piece.end))
    return found


def _with_punctuation(words: Sequence[TokenWord]) -> list[TokenWord]:
    """Opening marks join the word after them, closing ones the word before."""
    found: list[TokenWord] = []
    for word in words:
        mark = word.text.strip()
        closes = bool(mark) and mark in _CLOSING and not word.text.startswith(" ")
        before = found[-1].text if found else ""
        opened = before.startswith(" ") and before.strip() != "" and before.strip() in _OPENING
        if found and (closes or opened):
            last = found.pop()
            found.append(TokenWord(last.text + word.text, last.begin, word.end))
        else:
            found.append(word)
    return [word for word in found if word.text.strip()]
