"""The fewest tokens that a text can become, computed without tokenizing it.

A token of n bytes covers n bytes of text. So if every byte counts ``1 / n``, where n is the length of the
longest token that contains this byte, then no token counts more than 1, and the sum over a text is at most
the number of its tokens. Texts of letters get a much better bound this way than from the longest token of
all, which is often a run of a hundred spaces.

The bound holds only where nothing of a text is lost before it becomes tokens. Normalizers, pre-tokenizers
and models that drop text, or that make one token of any amount of it (an unknown word), have no bound;
:func:`measure_of` knows those that have one, and takes all others for such that have none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tokenizers

_ASCII = 128
_SLICE = 1 << 18
"""Bytes that are counted in one call, which keeps other threads waiting."""
_COMPOSED = 4
"""Most code points that NFC and NFKC make one: the longest canonical decomposition has as many."""
_COMPOSING = frozenset({"NFC", "NFKC"})
_KEEPING = frozenset({"NFD", "NFKD", "ByteLevel", "Prepend"})
"""Normalizers that make no text shorter, counted in code points."""
_SPLITTING = frozenset({"ByteLevel", "Digits", "UnicodeScripts"})
"""Pre-tokenizers that keep all text."""
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_METASPACE = "▁"
_ASCII_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f "
_OTHER_SPACES = (
    "\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
    "\u202f\u205f\u3000"
)


class _Lossy(Exception):
    """A part of the tokenizer drops text, or may."""


class TextMeasure:
    """Bounds for the texts of one vocabulary. Thread-safe.

    Args:
        pieces: bytes of every token.
        shrinks: most code points of a text that normalization makes one.
        touched: ASCII characters that normalization may change, alone or with their neighbours.
        composes: normalization may make one character of an ASCII one and those that follow it.
        strips: some tokens swallow the white space beside them.
    """

    def __init__(
        self,
        pieces: Iterable[bytes],
        *,
        shrinks: int = 1,
        touched: Iterable[str] = (),
        composes: bool = False,
        strips: bool = False,
    ) -> None:
        longest, widths = 1, np.ones(_ASCII)
        for piece in pieces:
            size = len(piece)
            longest = max(longest, size)
            for byte in set(piece):
                if byte < _ASCII and widths[byte] < size:
                    widths[byte] = size
        self._least = 1.0 / (shrinks * longest)
        self._weights = 1.0 / widths
        self._composes = composes
        self._strips = strips
        for character in touched:
            self._weights[ord(character)] = self._least
        if strips:
            self._weights[[ord(space) for space in _ASCII_SPACES]] = 0.0

    def fewest(self, text: str) -> int:
        """Tokens that the text becomes at least, special ones left out. The text must be UTF-8."""
        data = np.frombuffer(text.encode(), np.uint8)
        alone, joined = np.zeros(256, np.int64), np.zeros(256, np.int64)
        for at in range(0, len(data), _SLICE):
            part = data[at : at + _SLICE + 1]
            own = part[:_SLICE]
            alone += np.bincount(own, minlength=256)
            if self._composes:
                before = own[: len(part) - 1]
                joined += np.bincount(before[part[1:] >= _ASCII], minlength=256)
        num_others = len(text) - int(alone[:_ASCII].sum())
        if self._strips and num_others:
            num_others -= sum(map(text.count, _OTHER_SPACES))
        before_others = joined[:_ASCII]
        total = float((alone[:_ASCII] - before_others) @ self._weights)
        total += float(before_others @ np.minimum(self._weights, self._least))
        return max(0, math.ceil(total + num_others * self._least - 1e-6))


def measure_of(
    backend: tokenizers.Tokenizer, piece: Callable[[str], bytes], *, byte_level: bool
) -> TextMeasure | None:
    """Bounds of a tokenizer whose tokens are byte strings; None: it has none.

    Args:
        piece: a token's spelling -> its bytes.
        byte_level: spellings have a character for each byte; False: ``▁`` is a space and ``<0xAB>`` a byte.
    """
    normalizers = _steps(backend.normalizer, "normalizers")
    splitters = _steps(backend.pre_tokenizer, "pretokenizers")
    try:
        _check_complete(backend, [*normalizers, *splitters], byte_level=byte_level)
        for step in splitters:
            _check_splitter(step, byte_level=byte_level)
        shrinks, touched = 1, ""
        for step in normalizers:
            factor, changed = _normalization(step, byte_level=byte_level)
            shrinks, touched = shrinks * factor, touched + changed
    except _Lossy:
        return None
    return TextMeasure(
        _pieces(backend, piece),
        shrinks=shrinks,
        touched=touched,
        composes=any(step["type"] in _COMPOSING for step in normalizers),
        strips=any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values()),
    )


def _steps(part: Any, plural: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as ``tokenizer.json`` has it, sequences taken apart."""
    if part is None:
        return []
    pending, found = [json.loads(part.__getstate__())], []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step[plural]
        else:
            found.append(step)
    return found


def _check_complete(
    backend: tokenizers.Tokenizer, steps: Iterable[Mapping[str, Any]], *, byte_level: bool
) -> None:
    """Every byte must have a token: what has none is dropped, or any amount of it becomes one token."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        raise _Lossy
    if byte_level:
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        complete = any(step["type"] == "ByteLevel" for step in steps)
    else:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
        complete = bool(model.byte_fallback)
    if not complete or any(model.token_to_id(spelling) is None for spelling in alphabet):
        raise _Lossy


def _check_splitter(step: Mapping[str, Any], *, byte_level: bool) -> None:
    kind = step["type"]
    if kind in _SPLITTING:
        return
    if kind in ("Split", "Punctuation") and step.get("behavior") != "Removed":
        return
    if kind == "Metaspace" and not byte_level and step.get("replacement") == _METASPACE:
        return
    raise _Lossy


def _normalization(step: Mapping[str, Any], *, byte_level: bool) -> tuple[int, str]:
    """(code points that may become one, ASCII characters that may change)."""
    kind = step["type"]
    if kind in _KEEPING:
        return 1, ""
    if kind in _COMPOSING:
        return _COMPOSED, ""
    if kind == "Lowercase":
        return 1, _UPPER
    if kind == "Replace":
        return _replacement(step, byte_level=byte_level)
    raise _Lossy


def _replacement(step: Mapping[str, Any], *, byte_level: bool) -> tuple[int, str]:
    pattern, content = step["pattern"].get("String"), step.get("content") or ""
    if not byte_level and pattern == " " and content == _METASPACE:
        return 1, ""  # the bytes of tokens have the space back
    if not pattern or not content or not content.isascii():
        raise _Lossy
    return -(-len(pattern) // len(content)), "".join(c for c in pattern if c.isascii())


def _pieces(backend: tokenizers.Tokenizer, piece: Callable[[str], bytes]) -> Iterable[bytes]:
    """Bytes of all tokens; of added ones also as they are looked for in texts."""
    for token_id in range(backend.get_vocab_size(with_added_tokens=True)):
        spelling = backend.id_to_token(token_id)
        if spelling is not None:
            yield piece(spelling)
    for token in backend.get_added_tokens_decoder().values():
        yield token.content.encode()
        if token.normalized and backend.normalizer is not None:
            yield backend.normalizer.normalize_str(token.content).encode()
