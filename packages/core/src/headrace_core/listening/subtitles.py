"""Segments as SubRip (.srt) and WebVTT (.vtt, https://www.w3.org/TR/webvtt1/) files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape

from headrace_core.listening.timed import Segment


def srt(segments: Iterable[Segment]) -> str:
    """What is said and when; segments without text are left out."""
    blocks = (
        f"{number}\n{_time(s.start, ',')} --> {_time(s.end, ',')}\n{_line(s.text)}\n"
        for number, s in enumerate(_spoken(segments), 1)
    )
    return "\n".join(blocks)


def vtt(segments: Iterable[Segment]) -> str:
    """The same; what would be markup in a cue is escaped."""
    blocks = (
        f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{escape(_line(s.text), quote=False)}\n"
        for s in _spoken(segments)
    )
    return "\n".join(["WEBVTT\n", *blocks])


def _spoken(segments: Iterable[Segment]) -> Iterator[Segment]:
    return (segment for segment in segments if segment.text.strip())


def _line(text: str) -> str:
    """A text that cannot be mistaken for a line of times, or for the end of its block."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    rest, thousandths = divmod(thousandths, 1000)
    minutes, seconds = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{thousandths:03d}"
