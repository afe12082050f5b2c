"""Counts the names, values and levels of a JSON text before it is decoded.

Decoding and validating keep the interpreter's lock to their end: 0.5 microseconds for each name of an
object, as many for an object or list, 0.05 for a number. Bytes say little: 50 MB may be one text or ten
million names. Strings are skipped, so a prompt may hold any text.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

SLICE = 1 << 17
"""Bytes that are looked at in one go, which keeps other threads waiting: up to 2 ms."""


class JsonCounts(NamedTuple):
    """Numbers of names and values in a JSON text, outside its strings."""

    names: int
    """Names in objects, and objects and lists."""
    items: int
    """Values in objects and lists, but for one in each."""


def exceeds(data: bytes, most: JsonCounts) -> bool:
    """True if a JSON text holds more names or more values than ``most``.

    In a text that is not valid JSON, the part before its first error is counted: no decoder gets further.
    """
    names = items = 0
    for outside in _outside_strings(data):
        names += outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        items += outside.count(b",")
        if names > most.names or items > most.items:
            return True
    return False


def nesting(data: bytes) -> int:
    """Levels of objects and lists that a JSON text opens within each other; 0: it is a plain value.

    Takes 0.1 microseconds for each bracket.
    """
    level = deepest = 0
    for outside in _outside_strings(data):
        brackets = outside.translate(None, _NO_BRACKETS)
        for at in range(0, len(brackets), _BRACKETS):  # between two of them other threads run
            levels = list(
                accumulate(map(_STEPS.__getitem__, brackets[at : at + _BRACKETS]), initial=level)
            )
            level, deepest = levels[-1], max(deepest, max(levels))
    return deepest


_BRACKETS = 1 << 13
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - _STEPS.keys())


def _outside_strings(data: bytes) -> Iterator[bytes]:
    """The text without its strings, in slices."""
    in_string = 0
    held = b""
    for at in range(0, len(data), SLICE):
        part = held + data[at : at + SLICE]
        held = b"\\" if (len(part) - len(part.rstrip(b"\\"))) % 2 else b""
        if held:
            part = part[:-1]  # what it escapes comes with the next slice
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.split(b'"')
        yield b" ".join(pieces[in_string::2])
        in_string ^= (len(pieces) - 1) % 2
