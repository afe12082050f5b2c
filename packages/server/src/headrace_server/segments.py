"""What a piece of an answer can be. The words that parsers and protocols share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that leads to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call."""

    index: int
    """Which call of the turn; calls come one after the other."""
    name: str | None
    """With the call's first piece. A dot separates a built-in tool's server from the tool."""
    arguments: str


@dataclass(frozen=True, slots=True)
class Break:
    """The model ended a message; what follows is another one, even of the same kind."""


Segment = Reasoning | Content | CallPiece | Break
