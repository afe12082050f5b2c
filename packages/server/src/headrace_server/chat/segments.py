"""Segments of an answer, and the reader that finds them. Parsers and protocols share these words."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Reasoning(Struct, frozen=True, gc=False):
    """Text that leads to the answer."""

    text: str


class Content(Struct, frozen=True, gc=False):
    """Text of the answer."""

    text: str


class CallPiece(Struct, frozen=True, gc=False):
    """A piece of a call."""

    index: int
    """Index of the call in the turn; calls come one after the other."""
    name: str | None
    """With the call's first piece. A dot separates a built-in tool's server from the tool."""
    arguments: str


class MessageBreak(Struct, frozen=True, gc=False):
    """The model ended a message; what follows is another one, even of the same kind."""


Segment = Reasoning | Content | CallPiece | MessageBreak


class AnswerReader(Protocol):
    """One choice's text, piece by piece -> segments."""

    @property
    def thoughts(self) -> list[str]:
        """The reasoning in pieces, kept or not."""
        ...

    @property
    def called(self) -> bool:
        """A tool was called."""
        ...

    @property
    def call_is_open(self) -> bool:
        """The last call's arguments are not complete."""
        ...

    @property
    def ends_in_call(self) -> bool:
        """The output was cut within a call, or within what may have become one behind another."""
        ...

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        """Take the next piece; with ``last``, also what was held back.

        Args:
            cut: the output ends here because it was cut
                (:func:`headrace_server.parsing.answer_parser.is_cut`). Behind a call, what was
                held back is then the beginning of another or of a tag, and is dropped.
        """
        ...

    def call_id(self, index: int, name: str) -> str | None:
        """The id that the model's format gives to a call; None: any will do."""
        ...
