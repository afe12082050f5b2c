"""Text on its way in and out: tokenizers, tool-call parsers, reasoning parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text <-> token ids of one checkpoint. Thread-safe; holds no per-request state."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that decode to something, added tokens included."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` drops."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source, None if the checkpoint has none."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token``, ... -> text; names that templates use."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens' texts inside ``text`` become their ids."""
        ...

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Incomplete UTF-8 becomes U+FFFD. Ids outside the vocabulary decode to nothing."""
        ...

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token; "" outside the vocabulary."""
        ...


class TokenizerFactory(Protocol):
    """The object behind an entry point of ``headrace.tokenizers``."""

    def __call__(self, path: Path) -> Tokenizer:
        """Read a checkpoint folder. Raises ModelError naming the file that is missing or bad."""
        ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model wrote."""

    name: str
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call while it is being written."""

    index: int
    """Which call of the answer."""
    name: str | None = None
    """Once, with the call's first piece."""
    arguments: str = ""
    """JSON text to append."""


@dataclass(slots=True)
class ParsedDelta:
    """What a piece of output text turned out to be."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class ToolCallParser(ABC):
    """Finds tool calls in output text. One object per answer; linear time, no ``eval``.

    For every way of cutting a text into pieces, feeding the pieces and finishing gives the same
    content and calls; text that is no well-formed call is returned as content, never dropped.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools

    @abstractmethod
    def feed(self, text: str) -> ParsedDelta:
        """Take the next piece; returns what is certain so far."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """No more text comes: returns what was held back."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """A whole text at once: (content, calls)."""
        content = ""
        calls: dict[int, tuple[str, str]] = {}
        for delta in (self.feed(text), self.finish()):
            content += delta.content
            for piece in delta.tool_calls:
                name, arguments = calls.get(piece.index, ("", ""))
                calls[piece.index] = (piece.name or name, arguments + piece.arguments)
        return content, [
            ToolCall(name, arguments) for _, (name, arguments) in sorted(calls.items())
        ]


class ReasoningParser(ABC):
    """Separates reasoning from answer. One object per answer; same rules as tool-call parsers."""

    @abstractmethod
    def feed(self, text: str) -> ParsedDelta:
        """Take the next piece; returns what is certain so far."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """No more text comes: returns what was held back."""
