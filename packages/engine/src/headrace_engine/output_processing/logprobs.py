"""Log-probabilities as requests return them: a list of mappings, or flat."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

from headrace_core.output import FlatLogprobs, Logprob, Logprobs
from headrace_core.step import TokenLogprobs

TokenText = Callable[[int], str | None]
"""One token's text; None without a tokenizer."""
TokenBytes = Callable[[int], bytes | None]
"""One token's bytes; None without a tokenizer."""


def new_logprobs(flat: bool) -> Logprobs:
    """An empty container of the form that a request asked for."""
    return FlatLogprobs() if flat else []


def append_position(
    into: Logprobs,
    position: TokenLogprobs,
    text: TokenText,
    own: bytes | None,
    others: TokenBytes,
) -> None:
    """Append one position: the chosen (or prompt) token first, then by rank.

    Args:
        text: of any token.
        own: the first token's bytes.
        others: any other token's bytes.
    """
    ids = position.token_ids
    decoded = [text(token_id) for token_id in ids]
    pieces = [own if token_id == ids[0] else others(token_id) for token_id in ids]
    if isinstance(into, FlatLogprobs):
        into.append_fast(ids, position.logprobs, position.ranks, decoded, pieces)
        return
    entries: dict[int, Logprob] = {}
    rows = zip(ids, position.logprobs, position.ranks, decoded, pieces, strict=True)
    for token_id, logprob, rank, token, piece in rows:
        entries.setdefault(token_id, Logprob(logprob, rank, token, piece))
    into.append(entries)


def prompt_logprobs(
    positions: list[TokenLogprobs], flat: bool, text: TokenText, own: TokenBytes
) -> Logprobs:
    """A whole prompt's: nothing for its first token, then one entry per position."""
    found = new_logprobs(flat)
    found.append(None)
    for position in positions:
        append_position(found, position, text, own(position.token_ids[0]), own)
    return found


def split(whole: Logprobs, count: int) -> tuple[Logprobs, Logprobs]:
    """The first ``count`` positions, and the others."""
    return whole[:count], whole[count:]


class HeldTokens:
    """Tokens whose text a stop string may still cut off, with the bytes that each would add.

    The text of such a token is not certain, so its log-probabilities are held back with it: a stream
    has told nobody of bytes that the text then lacks.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """One for each token that was not handed out."""
        self._ends: list[int] = []
        """Characters of the uncut text up to the end of each."""
        self._inside: list[bool] = []
        """True for each token that ends inside a further character."""
        self._begin = 0
        """Characters of the uncut text in front of the first of them."""
        self._num_characters = 0
        self._num_shown = 0

    def add(self, piece: bytes, text: str, *, inside: bool) -> None:
        """A token came.

        Args:
            text: what became certain of the uncut text.
            inside: whether it ends inside a character.
        """
        self._num_characters += len(text)
        self._pieces.append(piece)
        self._ends.append(self._num_characters)
        self._inside.append(inside)

    def show(self, text: str) -> None:
        """This text is certain to be output."""
        self._num_shown += len(text)

    @property
    def num_certain(self) -> int:
        """Tokens, of those not handed out, whose text is output whole and ends with a character."""
        count = bisect.bisect_right(self._ends, self._num_shown)
        while count and self._inside[count - 1]:
            count -= 1
        return count

    def hand_out(self, count: int) -> None:
        """The first so many tokens have been handed out."""
        if count:
            self._begin = self._ends[count - 1]
            del self._pieces[:count], self._ends[:count], self._inside[:count]

    def cut(self, into: Logprobs) -> None:
        """No more text comes: take from the last tokens' entries the bytes that the text lacks.

        Args:
            into: its last positions are those of the tokens that were not handed out.
        """
        left = num_bytes(b"".join(self._pieces), self._num_shown - self._begin)
        first = len(into) - len(self._pieces)
        for index, piece in enumerate(self._pieces):
            if len(piece) > left:
                _replace_bytes(into, first + index, piece[:left])
            left = max(0, left - len(piece))


def num_bytes(data: bytes, num_characters: int) -> int:
    """Bytes at the beginning of ``data`` that decode to so many characters; a run of bytes that is
    not valid UTF-8 counts as one (``errors="replace"``)."""
    at = 0
    while num_characters > 0 and at < len(data):
        try:
            text, wrong = data[at:].decode(), 0
        except UnicodeDecodeError as error:
            text, wrong = data[at : at + error.start].decode(), error.end - error.start
        if len(text) >= num_characters:
            return at + len(text[:num_characters].encode())
        num_characters -= len(text) + 1
        at += len(text.encode()) + wrong
    return at


def _replace_bytes(into: Logprobs, index: int, piece: bytes) -> None:
    """Change the bytes of a position's first token; outputs that share the position keep theirs."""
    if isinstance(into, FlatLogprobs):
        into.token_bytes[into.start_indices[index]] = piece
        return
    entries = dict(into[index] or {})
    chosen = next(iter(entries))
    entries[chosen] = dataclasses.replace(entries[chosen], token_bytes=piece)
    into[index] = entries
