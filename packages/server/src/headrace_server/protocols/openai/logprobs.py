"""Log-probabilities in the forms of the wire. Minus infinity is shown as -9999, valid in JSON.

A token's ``bytes`` are what it adds to the text, so those of an answer's tokens, joined, are the text's
UTF-8, wherever the tokens cut its characters; ``token`` shows a part of a character as U+FFFD.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from headrace_core.output import Logprob, Logprobs, PositionLogprobs
from headrace_server.protocols.openai.bodies.chat import (
    ChunkChatLogprobs,
    ChunkContentLogprob,
    ChunkToken,
)
from headrace_server.protocols.openai.bodies.completions import ChunkLogprobs, ChunkPromptLogprob
from headrace_server.streaming.offload import encoded

LEAST = -9999.0
_FEW = 32
"""Positions up to which a block is made of objects, which its reader encodes."""


def finite(value: float) -> float:
    """The value, or :data:`LEAST` if it is lower or not a number."""
    return value if value >= LEAST else LEAST


@dataclass(slots=True)
class CompletionFormat:
    """Builds ``logprobs`` of one choice of a completion; keeps the place in its text between chunks.

    Args:
        count: likeliest tokens per position.
        as_ids: show tokens as ``token_id:N``.
    """

    count: int
    as_ids: bool
    _place: TextPlace = field(default_factory=lambda: TextPlace())

    def build(
        self, token_ids: Sequence[int], positions: Iterable[PositionLogprobs | None]
    ) -> ChunkLogprobs:
        """One chunk's entries."""
        result = ChunkLogprobs([], [], [], [])
        for token_id, entries in zip(token_ids, positions, strict=True):
            chosen = entries.get(token_id) if entries else None
            offset = self._place.add(bytes_of(chosen) or b"" if chosen else b"")
            self._append(result, token_id, entries, "", offset)
        return result

    def build_prompt(
        self,
        token_ids: Sequence[int],
        positions: Iterable[PositionLogprobs | None],
        first_text: str,
        text: str,
        special: Collection[bytes] = (),
    ) -> ChunkLogprobs:
        """Entries of a prompt that is repeated in front of the completion.

        Args:
            first_text: text of the token that has no entry: the first.
            text: the prompt as it is repeated.
            special: the special tokens' texts.
        """
        listed = list(positions)
        chosen = [e.get(i) if e else None for i, e in zip(token_ids, listed, strict=True)]
        own = [first_text.encode() if c is None else bytes_of(c) or b"" for c in chosen]
        place, result = TextPlace(), ChunkLogprobs([], [], [], [])
        for token_id, entries, piece in zip(token_ids, listed, pieces_in(text, own, special)):
            self._append(result, token_id, entries, first_text, place.add(piece))
        self._place = TextPlace(len(text))
        return result

    def _append(
        self,
        into: ChunkLogprobs,
        token_id: int,
        entries: PositionLogprobs | None,
        text: str,
        offset: int,
    ) -> None:
        chosen = entries.get(token_id) if entries else None
        shown = _text(token_id, chosen) if chosen else text
        into.text_offset.append(offset)
        into.tokens.append(_shown(token_id, shown, self.as_ids))
        if entries is None or chosen is None:
            into.token_logprobs.append(None)
            into.top_logprobs.append(None)
            return
        into.token_logprobs.append(finite(chosen.logprob))
        top: dict[str, float] = {}
        for other, entry in [(token_id, chosen), *_best(entries, self.count)]:
            name = _shown(other, _text(other, entry), self.as_ids)
            top.setdefault(name, finite(entry.logprob))
        into.top_logprobs.append(top)


class TextPlace:
    """A place in a text that grows by tokens' bytes.

    Args:
        num_characters: of what is before it.
    """

    def __init__(self, num_characters: int = 0) -> None:
        self._num_characters = num_characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._inside = False
        """True if the bytes so far end inside a character."""

    def add(self, piece: bytes) -> int:
        """Go on behind a token.

        Returns:
            Where it begins, in characters; of a token that begins inside a character: where that
            character begins.
        """
        begin = self._num_characters
        if not self._inside and piece.isascii():
            self._num_characters += len(piece)
            return begin
        if self._inside and piece:
            found = self._decode(piece[:1])
            # Nothing, or the character's end: it goes on. Else what came before is U+FFFD.
            begin += not (found == 0 or (found == 1 and not self._inside))
            piece = piece[1:]
        self._decode(piece)
        return begin

    def _decode(self, piece: bytes) -> int:
        found = len(self._decoder.decode(piece))
        held = self._decoder.getstate()[0]
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            # Python waits for the third byte of a surrogate; UTF-8 has none: each byte is U+FFFD.
            found, held = found + len(held), b""
            self._decoder.reset()
        self._num_characters += found
        self._inside = held != b""
        return found


def pieces_in(text: str, pieces: Sequence[bytes], special: Collection[bytes] = ()) -> list[bytes]:
    """The part of a prompt's text that each of its tokens stands for.

    A prompt of tokens is shown as they decode. One of text may lack special tokens that were put
    around it, and the space with which some vocabularies begin; its tokens may lack the spaces between
    words; and it may have been normalized, so that this is a guess.

    Args:
        pieces: the tokens' own bytes; the first may be only what is shown of it.
        special: of special tokens.
    """
    whole, rest = text.encode("utf-8", "replace"), b"".join(pieces[1:])
    if whole.endswith(rest):
        return [whole[: len(whole) - len(rest)], *pieces[1:]]
    if b"".join(pieces).decode("utf-8", "replace") == text:
        return list(pieces)
    found, at = [], 0
    for piece in pieces:
        size = _size_at(whole, at, piece, special)
        found.append(whole[at : at + size])
        at += size
    return found


def _size_at(whole: bytes, at: int, piece: bytes, special: Collection[bytes]) -> int:
    """Bytes of a text, from a place on, that a token stands for."""
    if whole.startswith(piece, at):
        return len(piece)
    if piece[:1] == b" " and whole.startswith(piece[1:], at):
        return len(piece) - 1
    spaces = 0
    while whole[at + spaces : at + spaces + 1].isspace():
        spaces += 1
    if whole.startswith(piece, at + spaces):
        return spaces + len(piece)
    if piece in special:
        return 0
    return len(piece) + (0 if piece[:1].isspace() else spaces)


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[PositionLogprobs | None],
    count: int,
    as_ids: bool,
) -> ChunkChatLogprobs:
    """``logprobs`` of a chat choice; ``top_logprobs`` holds the ``count`` likeliest."""
    entries = content_logprobs(token_ids, positions, count, as_ids)
    block = ChunkChatLogprobs([])
    if len(token_ids) > _FEW:
        block.content = cast(Any, encoded(entries))
    else:
        block.content.extend(entries)
    return block


def content_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[PositionLogprobs | None],
    count: int,
    as_ids: bool,
) -> Iterator[ChunkContentLogprob]:
    """The entries of :func:`chat_logprobs`, one by one."""
    for token_id, entries in zip(token_ids, positions, strict=True):
        entries = entries or {}
        chosen = _token(token_id, entries.get(token_id) or Logprob(LEAST), as_ids)
        top = [_token(other, entry, as_ids) for other, entry in _best(entries, count)]
        yield ChunkContentLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def without_last_bytes(positions: Logprobs) -> Logprobs:
    """A copy in which the last position's token has no bytes: the text does not show it."""
    *others, last = positions
    entries = dict(last or {})
    for token_id in list(entries)[:1]:
        entries[token_id] = dataclasses.replace(entries[token_id], token_bytes=b"")
    return [*others, entries]


def prompt_logprobs(
    positions: Iterable[PositionLogprobs | None],
) -> msgspec.Raw:
    """Per prompt token: id as text -> entry; None for the first. As JSON."""
    return encoded(
        None
        if entries is None
        else {
            str(token_id): ChunkPromptLogprob(finite(e.logprob), e.rank, e.decoded_token)
            for token_id, e in entries.items()
        }
        for entries in positions
    )


def _best(entries: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    if count == 0:
        return []
    ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return ordered if count < 0 else ordered[:count]


def _text(token_id: int, entry: Logprob) -> str:
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"


def _shown(token_id: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def _token(token_id: int, entry: Logprob, as_ids: bool) -> ChunkToken:
    text = _shown(token_id, _text(token_id, entry), as_ids)
    own = bytes_of(entry)
    return ChunkToken(text, finite(entry.logprob), None if own is None else list(own))


def bytes_of(entry: Logprob) -> bytes | None:
    """A token's own bytes; None: not known, as without a tokenizer."""
    if entry.token_bytes is not None or entry.decoded_token is None:
        return entry.token_bytes
    return entry.decoded_token.encode("utf-8", "replace")
