"""Pieces of an answer, grouped: reasoning, texts and calls that open, grow and close in order.

Both the Responses and the Anthropic protocol show an answer as a list of such blocks, of which one
at a time is being written. A whole answer passes through here too, as one piece, so that it cannot
differ from what a stream says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from msgspec import Raw

from headrace_server.chat.segments import CallPiece, Content, MessageBreak, Reasoning, Segment

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer."""

    kind: Kind
    position: int
    """In the answer, from 0."""
    name: str = ""
    """Name of a call."""
    call_id: str = ""
    parts: list[str] = field(default_factory=list)
    """The text in pieces: appending to one string would copy it for every token."""
    logprobs: list[Raw] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Text of the block; arguments of a call, JSON as the model wrote it."""
        return "".join(self.parts)


class BlockChange(Enum):
    """A change of a block. The first is OPEN, the last CLOSE."""

    OPEN = "open"
    GROW = "grow"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class BlockStep:
    """One change of one block."""

    change: BlockChange
    block: Block
    text: str = ""
    """Text that GROW appended."""
    logprobs: tuple[Raw, ...] = ()
    """Entries of the tokens since the last GROW."""


class Blocks:
    """One turn's blocks. White space alone opens no block of text or reasoning.

    Args:
        first: position of the first block.
        make_id: (index, name) of a call -> its id.
    """

    def __init__(self, first: int, make_id: Callable[[int, str], str]) -> None:
        self.blocks: list[Block] = []
        self._first = first
        self._make_id = make_id
        self._open: Block | None = None
        self._space = ""
        """White space that waits for text of the same kind."""
        self._space_kind: Kind = "text"
        self._logprobs: list[Raw] = []
        self._call = -1

    @property
    def open(self) -> Block | None:
        """The block that is being written."""
        return self._open

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def take(self, segments: Sequence[Segment], logprobs: Sequence[Raw] = ()) -> list[BlockStep]:
        """The changes that segments bring.

        Args:
            logprobs: entries of the tokens that came with them.
        """
        self._logprobs += logprobs
        steps: list[BlockStep] = []
        for segment in segments:
            self._add(segment, steps)
        return steps

    def finish(self) -> list[BlockStep]:
        """No more comes: close what is open."""
        steps: list[BlockStep] = []
        self._close(steps)
        return steps

    def _add(self, segment: Segment, steps: list[BlockStep]) -> None:
        match segment:
            case Reasoning():
                self._add_text("reasoning", segment.text, steps)
            case Content():
                self._add_text("text", segment.text, steps)
            case CallPiece():
                self._add_call(segment, steps)
            case MessageBreak():
                self._close(steps)

    def _add_text(self, kind: Kind, text: str, steps: list[BlockStep]) -> None:
        block = self._open
        if block is None or block.kind != kind:
            held = self._space if self._space_kind == kind else ""
            self._space, self._space_kind = held + text, kind
            if not self._space.strip():
                return
            text = self._space
            self._close(steps)
            block = self._start(Block(kind, self._first + len(self.blocks)), steps)
        self._grow(block, text, steps)

    def _add_call(self, piece: CallPiece, steps: list[BlockStep]) -> None:
        if piece.index != self._call or self._open is None:
            self._close(steps)
            self._call = piece.index
            name = piece.name or ""
            block = Block("call", self._first + len(self.blocks), name=name)
            block.call_id = self._make_id(piece.index, name)
            self._start(block, steps)
        assert self._open is not None
        if piece.arguments:
            self._grow(self._open, piece.arguments, steps)

    def _start(self, block: Block, steps: list[BlockStep]) -> Block:
        self.blocks.append(block)
        self._open = block
        steps.append(BlockStep(BlockChange.OPEN, block))
        return block

    def _grow(self, block: Block, text: str, steps: list[BlockStep]) -> None:
        entries: tuple[Raw, ...] = ()
        if block.kind == "text":
            entries, self._logprobs = tuple(self._logprobs), []
            block.logprobs += entries
        block.parts.append(text)
        steps.append(BlockStep(BlockChange.GROW, block, text, entries))

    def _close(self, steps: list[BlockStep]) -> None:
        """Entries of tokens without a text (the end token) go to the text before them."""
        self._space = ""
        block, self._open = self._open, None
        if block is None:
            return
        if block.kind == "text" and self._logprobs:
            self._grow(block, "", steps)
        steps.append(BlockStep(BlockChange.CLOSE, block))
