"""Text from tokens, a few tokens at a time, without ever taking a character back.

Two ways, chosen by :func:`make_detokenizer`:

- :class:`ByteDetokenizer`, for vocabularies whose tokens are byte strings (byte-level BPE, and
  sentencepiece-style ones with or without byte fallback): one table look-up per token and an
  incremental UTF-8 decoder. The pieces it returns, joined, are the whole text's decoding, by
  construction: both are the same bytes through the same decoder.
- :class:`WindowDetokenizer`, for all others: decodes a short window twice, with and without the
  new token, and returns the difference.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard, runtime_checkable

from headrace_core.sampling.params import SamplingParams
from headrace_core.text import Tokenizer

REPLACEMENT = "�"
MAX_HELD_TOKENS = 16
"""Tokens that a window holds back for the sake of an incomplete character. No character is longer;
what is still incomplete then is no character."""
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


@runtime_checkable
class BytePieces(Protocol):
    """A tokenizer whose tokens are byte strings."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes, possibly of a part of a character; b"" outside the vocabulary."""
        ...

    def first_token_bytes(self, token_id: int) -> bytes:
        """The same at the beginning of a text, where some vocabularies drop a space."""
        ...


class Detokenizer(Protocol):
    """One output's text. Returned pieces are final."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take tokens; returns the text that is certain now."""
        ...

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        """Take one token.

        Returns:
            The text that is certain now, and the token's own bytes. The bytes of all tokens, joined
            and decoded with ``errors="replace"``, are the text.
        """
        ...

    def would_add(self, token_id: int) -> bytes:
        """The bytes that a token would add to the text if it came next."""
        ...

    @property
    def inside(self) -> bool:
        """True if the tokens so far end inside a character."""
        ...

    def finish(self) -> str:
        """No more tokens come: returns the rest, incomplete characters as U+FFFD."""
        ...


class ByteDetokenizer:
    """Text of tokens that are byte strings. Cost per token: one look-up, and its bytes.

    Args:
        pieces: the vocabulary.
        skip_special_tokens: leave them out.
        prompt_token_ids: what the text continues; only asked whether it is empty of text.
    """

    def __init__(
        self,
        pieces: BytePieces,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._pieces = pieces
        self._skipped = pieces.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.inside = False
        """See :attr:`Detokenizer.inside`."""
        self._at_start = not any(map(self._shows, prompt_token_ids))

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._at_start:
            return self._decode(self._beginning(token_ids))
        skipped, token_bytes = self._skipped, self._pieces.token_bytes
        return self._decode(b"".join([token_bytes(i) for i in token_ids if i not in skipped]))

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        piece = self.would_add(token_id)
        if self._at_start:
            self._at_start = not self._shows(token_id)
        return self._decode(piece), piece

    def would_add(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if self._at_start:
            return self._pieces.first_token_bytes(token_id)
        return self._pieces.token_bytes(token_id)

    def _beginning(self, token_ids: Sequence[int]) -> bytes:
        found = bytearray()
        for token_id in token_ids:
            found += self.would_add(token_id)
            if self._at_start:
                self._at_start = not self._shows(token_id)
        return bytes(found)

    def _decode(self, found: bytes) -> str:
        if not self.inside:
            try:
                return found.decode()  # whole characters, as nearly always: the short way
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(found)
        self.inside = self._decoder.getstate()[0] != b""
        return text

    def finish(self) -> str:
        return self._decoder.decode(b"", True)

    def _shows(self, token_id: int) -> bool:
        return token_id not in self._skipped and bool(self._pieces.token_bytes(token_id))


class WindowDetokenizer:
    """Text of tokens of any vocabulary. Cost per token: decoding a few tokens twice.

    ``_ids[_start:_done]`` are tokens whose text is out but that the next ones may need as context
    (word-piece vocabularies put a space before a word unless it is the first).
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._ids = list(prompt_token_ids[-MAX_HELD_TOKENS:])
        self._start, self._done = 0, len(self._ids)
        self._own_bytes = own_bytes(tokenizer)
        self._held = b""
        """Bytes of tokens that stand for bytes and whose text is not out."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def feed_one(self, token_id: int) -> tuple[str, bytes]:
        text = self._feed_one(token_id)
        if is_byte(self._tokenizer, token_id):
            piece = self._own_bytes(token_id)
            self._held = b"" if text else self._held + piece
            return text, piece
        # A word's bytes depend on what is before it (a space): what came out is what it added.
        piece = text.removeprefix(self._held.decode("utf-8", "replace")).encode("utf-8", "replace")
        if text:
            self._held = b""
        return text, piece

    def would_add(self, token_id: int) -> bytes:
        """The bytes of the token by itself: looking at its place in the text would cost two decodings."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_token_ids:
            return b""
        return self._own_bytes(token_id)

    @property
    def inside(self) -> bool:
        return bool(self._held)

    def finish(self) -> str:
        known, text = self._decode(self._start, self._done), self._decode(self._start, None)
        self._start = self._done = len(self._ids)
        return text[len(known) :]

    def _feed_one(self, token_id: int) -> str:
        self._ids.append(token_id)
        known, text = self._decode(self._start, self._done), self._decode(self._start, None)
        if text == known:
            self._ids.pop()  # shows nothing (skipped): must not lengthen the window
            return ""
        if text.endswith(REPLACEMENT) and len(self._ids) - self._done < MAX_HELD_TOKENS:
            return ""
        del self._ids[: self._done]
        self._start, self._done = 0, len(self._ids)
        return text[len(known) :]

    def _decode(self, start: int, end: int | None) -> str:
        return self._tokenizer.decode(
            self._ids[start:end],
            skip_special_tokens=self._skip_special_tokens,
            spaces_between_special_tokens=self._spaces,
        )


def make_detokenizer(
    tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
) -> Detokenizer:
    """The right kind for a tokenizer, with a request's settings."""
    if _has_byte_pieces(tokenizer):
        # Byte strings are joined as they are: there are no spaces between tokens to leave out.
        return ByteDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=prompt_token_ids,
        )
    return WindowDetokenizer(
        tokenizer,
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        prompt_token_ids=prompt_token_ids,
    )


def _has_byte_pieces(tokenizer: Tokenizer) -> TypeGuard[BytePieces]:
    """True of a :class:`BytePieces`; ``isinstance`` takes its time with protocols, and each request asks."""
    return hasattr(tokenizer, "token_bytes") and hasattr(tokenizer, "first_token_bytes")


def token_texts(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function from a token to its own text, for showing: spaces kept, parts of characters as
    U+FFFD."""
    if isinstance(tokenizer, BytePieces):
        token_bytes = tokenizer.token_bytes
        return lambda token_id: token_bytes(token_id).decode("utf-8", "replace")
    return lambda token_id: tokenizer.decode([token_id])


def own_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """A function from a token to its own bytes, special tokens' texts included; of a token that
    stands for a byte, that byte."""
    if isinstance(tokenizer, BytePieces):
        return tokenizer.token_bytes

    def find(token_id: int) -> bytes:
        if is_byte(tokenizer, token_id):
            return bytes((int(tokenizer.token_string(token_id)[3:5], 16),))
        return tokenizer.decode([token_id]).encode("utf-8", "replace")

    return find


def is_byte(tokenizer: Tokenizer, token_id: int) -> bool:
    """True if a token, spelled ``<0xAB>``, stands for a byte (a sentencepiece vocabulary with byte
    fallback): one that is only spelled so decodes to its spelling."""
    spelled = tokenizer.token_string(token_id)
    return _BYTE.fullmatch(spelled) is not None and tokenizer.decode([token_id]) != spelled
