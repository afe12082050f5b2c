"""Segments as SubRip (.srt) and WebVTT (.vtt, https://www.w3.org/TR/webvtt1/) files."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_server.speech.protocol import Segment


def srt(segments: Iterable[Segment]) -> str:
    blocks = (
        f"{number}\n{_time(s.start, ',')} --> {_time(s.end, ',')}\n{_line(s.text)}\n"
        for number, s in enumerate(segments, 1)
    )
    return "\n".join(blocks)


def vtt(segments: Iterable[Segment]) -> str:
    blocks = (f"{_time(s.start, '.')} --> {_time(s.end, '.')}\n{_line(s.text)}\n" for s in segments)
    return "\n".join(["WEBVTT\n", *blocks])


def _line(text: str) -> str:
    """A text that cannot be mistaken for a line of times, or for the end of its block."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    thousandths = round(seconds * 1000)
    rest, thousandths = divmod(thousandths, 1000)
    minutes, seconds = divmod(rest, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}{point}{thousandths:03d}"
