"""Text on its way in and out: tokenizers, tool-call parsers, reasoning parsers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable


class EncodedPair(NamedTuple):
    """One text, or two, as one prompt."""

    token_ids: list[int]
    token_type_ids: list[int]
    """For each token: which of the texts it belongs to, as the checkpoint numbers them (special
    tokens included); all 0 where it does not tell them apart."""


class Tokenizer(Protocol):
    """Text <-> token ids of one checkpoint. Thread-safe; holds no per-request state."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that decode to something, added tokens included."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` drops."""

    @property
    def chat_template(self) -> str | None:
        """Jinja source, None if the checkpoint has none."""

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """``bos_token``, ``eos_token``, ... -> text; names that templates use."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Special tokens' texts inside ``text`` become their ids."""

    def encode_pair(
        self,
        first: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
    ) -> EncodedPair:
        """One text, or two, with the special tokens that the checkpoint puts around and between.

        Args:
            max_length: most tokens, special ones included and always kept: the texts lose tokens at
                their beginnings, of two the longer one first (transformers' ``longest_first``). Where not
                even the special tokens fit, the last ``max_length`` tokens are left.
            truncation_side: ``right``: the texts lose tokens at their ends, and the first
                ``max_length`` tokens are left. The engine leaves the argument out where it means
                ``left``.
        """

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Incomplete UTF-8 becomes U+FFFD. Ids outside the vocabulary decode to nothing."""

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of one token; "" outside the vocabulary."""


@runtime_checkable
class GuardableTokenizer(Tokenizer, Protocol):
    """A tokenizer that can keep text of special tokens apart from the tokens.

    One that cannot is served too, but chats whose messages hold such text are refused then.
    """

    @property
    def special_texts(self) -> Mapping[int, str]:
        """Special tokens -> the texts that :meth:`encode` reads as them."""

    def guarded(self, guard: str) -> Tokenizer | None:
        """A tokenizer that encodes as this one does, except for one character, which it drops: where
        that stands behind the first character of a special token's text, the text is plain text.

        Args:
            guard: the character; in no token, and changed by no letter case.

        Returns:
            None: this vocabulary spells that text with the special token even then.
        """


class TokenizerFactory(Protocol):
    """The object behind an entry point of ``headrace.tokenizers``."""

    def __call__(self, path: Path) -> Tokenizer:
        """Read a checkpoint folder. Raises ModelError naming the file that is missing or bad."""


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
    """Index of the call in the answer."""
    name: str | None = None
    """Once, with the call's first piece."""
    arguments: str = ""
    """JSON text to append."""


@dataclass(slots=True)
class ParsedDelta:
    """Parsed parts of a piece of output text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class CallDelimiters(NamedTuple):
    """Texts around a call's arguments, in formats whose arguments are JSON."""

    trigger: str
    """The text with which calls begin, whatever tool they call; ``before`` begins with it."""
    before: str
    """Everything in front of the arguments."""
    after: str
    """Everything behind them."""


class ToolCallParser(ABC):
    """Finds tool calls in output text. One object per answer; linear time, no ``eval``.

    For every way of cutting a text into pieces, feeding the pieces and finishing gives the same
    content and calls, whether the text is well-formed or not. Text that is no well-formed call is
    returned as content, unless a piece of the call was given away before it broke: then that piece
    stands and the rest of the call is dropped. Arguments that were given away are JSON, or, of a
    call that broke, the beginning of JSON.
    """

    needs_special_tokens: ClassVar[bool] = False
    """True if the format's tags are special tokens, which output texts otherwise leave out."""
    structural_tags_include_reasoning: ClassVar[bool] = False
    """True if :meth:`strict_structural_tag` and :meth:`forced_structural_tag` describe the reasoning, too.
    With a reasoning format that has :attr:`ReasoningParser.calls_before_end` they hold from
    the first token on."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = tools

    def call_id(self, index: int, name: str) -> str | None:
        """The id that the format gives to a call; None: any will do."""
        return None

    @classmethod
    def call_delimiters(cls, name: str) -> CallDelimiters | None:
        """Delimiters of a call of one tool; None: the format is not JSON between fixed texts.

        By this the arguments of ``strict`` tools are held to their schemas while they are written.
        """
        return None

    @classmethod
    def strict_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any] | None]
    ) -> Mapping[str, Any] | None:
        """Structural tag of answers whose calls follow their schemas: text that is free but for
        calls, as the ``format`` of a structural tag.

        Args:
            tools: name -> schema of the arguments; None: of a tool that is not strict.

        Returns:
            None: only :meth:`call_delimiters`, if even that, is known.

        Raises:
            UnsupportedFeature: the format cannot write, or not unmistakably, what a schema asks for.
        """
        return None

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> Mapping[str, Any] | None:
        """The form of an answer that is nothing but calls, as the ``format`` of a structural tag.

        Every text of this form parses to 1 to ``most`` calls whose arguments hold to the schemas,
        and to no content. White space between tags is bounded.

        Args:
            tools: name -> JSON schema of the arguments.
            most: largest number of calls, at least 1.

        Returns:
            None: only :meth:`call_delimiters`, if even that, is known.

        Raises:
            UnsupportedFeature: the format cannot write, or not unmistakably, what a schema asks for.
        """
        return None

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


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """Facts about an answer that are known before its first token."""

    prompt_end: str = ""
    """The last characters of the rendered prompt, special tokens included; "" if unknown. A
    template may have opened the reasoning there, or closed it."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, including the operator's defaults, such as switches of thinking."""


class ReasoningParser(ABC):
    """Separates reasoning from answer. One object per answer; same rules as tool-call parsers."""

    needs_special_tokens: ClassVar[bool] = False
    """As for tool-call parsers."""
    start_marker: ClassVar[str] = ""
    """The text with which reasoning begins, in the output or already in the prompt; "": none, the
    output begins with reasoning."""
    begins_reasoning: ClassVar[bool] = True
    """True if an answer begins with reasoning even if neither prompt nor output holds the start
    marker. False: such an answer is all answer."""
    end_marker: ClassVar[str] = ""
    """The text after which the answer proper begins: constraints on its form hold from there.
    "": the format has none, and structured output is refused along with it."""
    keeps_in_content: ClassVar[bool] = False
    """True: nothing is split; reasoning stays in the content, up to and including the end marker. Where an
    answer is held to be nothing but calls, they are sought behind that marker."""
    calls_before_end: ClassVar[bool] = False
    """True if calls of tools may come before the end marker, where no constraint holds yet."""
    thought_end: ClassVar[str] = ""
    """The text that ends a thought in front of such a call. A thinking budget writes it instead of the
    end marker where a constraint describes reasoning and calls; "": the end marker does for both."""

    @classmethod
    def may_reason(cls, chat_template_kwargs: Mapping[str, Any]) -> bool:
        """True if an answer may begin with reasoning that its prompt has neither begun nor ended.

        Args:
            chat_template_kwargs: as in :class:`AnswerContext`.

        Returns:
            False: the template was told to switch reasoning off, so the answer is all answer.
        """
        return True

    def __init__(self, context: AnswerContext | None = None) -> None:
        self.context = context or AnswerContext()

    @abstractmethod
    def feed(self, text: str) -> ParsedDelta:
        """Take the next piece; returns what is certain so far."""

    @abstractmethod
    def finish(self) -> ParsedDelta:
        """No more text comes: returns what was held back."""
