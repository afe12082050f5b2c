"""Reading server-sent events, for logs of what was streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class EventDecoder:
    """Takes a stream's bytes in any pieces; keeps what is not whole yet.

    Args:
        limit: most characters of text that are kept.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._buffer = b""
        self._limit = limit
        self._texts: list[str] = []
        self._size = 0

    def feed(self, data: bytes) -> list[Any]:
        """The events that are whole now: decoded JSON; ``[DONE]`` and comments are left out."""
        self._buffer += data.replace(b"\r\n", b"\n")
        *whole, self._buffer = self._buffer.split(b"\n\n")
        events = [event for block in whole for event in _data_of(block)]
        for event in events:
            self._keep(text_of(event))
        return events

    @property
    def text(self) -> str:
        """The text of all events so far, first choice only."""
        return "".join(self._texts)

    def _keep(self, text: str) -> None:
        text = text[: self._limit - self._size]
        self._size += len(text)
        self._texts.append(text)


def text_of(event: Any) -> str:
    """Text that a chunk of a completion or a chat adds to its first choice; "" for other events."""
    if not isinstance(event, dict) or not isinstance(choices := event.get("choices"), list):
        return ""
    first = next((c for c in choices if isinstance(c, dict) and not c.get("index")), {})
    delta = first.get("delta")
    found = delta.get("content") if isinstance(delta, dict) else first.get("text")
    return found if isinstance(found, str) else ""


def _data_of(block: bytes) -> Iterator[Any]:
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line[:5] == b"data:"]
    data = b"\n".join(lines)
    if not data or data == b"[DONE]":
        return
    try:
        yield msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
