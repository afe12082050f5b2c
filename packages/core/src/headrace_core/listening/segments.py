"""Segments out of a clip's tokens, some of which are times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens of one segment."""

    start: float
    """Seconds from the clip's beginning."""
    end: float
    tokens: list[int]
    """Its times included."""
    text_tokens: list[int]


def spans(
    tokens: Sequence[int], timestamp: Callable[[int], float | None], seconds: float
) -> list[Span]:
    """Cut a clip's tokens at their times.

    A segment is text between two times; the next may begin later than it ends. Text before the first
    time begins with the clip, text after the last ends with it. Times beyond the clip are its end.

    Args:
        tokens: of the clip, end tokens left out.
        timestamp: seconds that a token stands for; None: it is text.
        seconds: length of the clip.
    """
    found: list[Span] = []
    start, held, text = 0.0, list[int](), list[int]()
    for token in tokens:
        time = timestamp(token)
        if time is None:
            text.append(token)
            held.append(token)
            continue
        time = min(time, seconds)
        if text:
            found.append(Span(start, max(start, time), [*held, token], text))
            held, text = [], []
        else:
            held = [token]
        start = time
    if text:
        found.append(Span(start, max(start, seconds), held, text))
    return found
