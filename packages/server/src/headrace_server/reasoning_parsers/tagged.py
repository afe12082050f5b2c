"""Formats with tags: ``<think>reasoning</think>answer`` and its relatives.

Whether an answer begins with reasoning is decided, in this order, by the end of the prompt (a
template may have opened the reasoning, or closed it), by the switch of thinking that the template
knows, and by the text itself: some formats begin with the opening tag, in others it may be
missing.

Nothing is trimmed but what belongs to the tags: reasoning and answer together are the text
without them. Reasoning that is cut off before its closing tag stays reasoning, since it was
streamed as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_server.parsing.text_scanner import Steps
from headrace_server.reasoning_parsers.streaming_parser import StreamingReasoningParser

MAX_SPACE = 64
"""More white space than this at the beginning is an answer's own."""
_OFF = (False, 0, "false", "False", "off", "no", "0")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of a format, and how it begins."""

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    begun: bool = False
    """Answers begin with reasoning, whether the opening tag comes or not."""
    switches: tuple[str, ...] = ()
    """Template variables that turn thinking on and off; the first that is given counts."""
    thinks: bool = True
    """True if the model thinks if none of them is given."""
    wrap: tuple[str, str] | None = None
    """Marks that may stand around the answer."""
    newlines: bool = False
    """One new line on the inside of each tag belongs to it."""


class TaggedReasoningParser(StreamingReasoningParser):
    """A format given by a :class:`ReasoningFormat`."""

    format: ClassVar[ReasoningFormat] = ReasoningFormat()
    start_marker: ClassVar[str] = "<think>"
    end_marker: ClassVar[str] = "</think>"
    begins_reasoning: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        cls.begins_reasoning = cls.format.begun

    def read(self) -> Steps[None]:
        opened = self._opened()
        if opened is None or opened:
            begun = yield from self._begin(certain=bool(opened))
            if begun:
                yield from self._reason()
        if self.format.wrap is not None:
            yield from self._unwrap(self.format.wrap)
        yield from self.source.until((), self.emit_content)

    def _opened(self) -> bool | None:
        """True if the answer begins with reasoning; None: it does if the opening tag comes."""
        fmt = self.format
        prompt = self.context.prompt_end.rstrip()
        if prompt.endswith(fmt.starts):
            return True
        if prompt.endswith(fmt.ends):
            return False
        if not fmt.begun:
            return None
        return self.may_reason(self.context.chat_template_kwargs)

    @classmethod
    def may_reason(cls, chat_template_kwargs: Mapping[str, Any]) -> bool:
        fmt = cls.format
        if not fmt.switches:
            return True
        given = [chat_template_kwargs[n] for n in fmt.switches if n in chat_template_kwargs]
        return fmt.thinks if not given else given[0] not in _OFF

    def _begin(self, *, certain: bool) -> Steps[bool]:
        """White space and the opening tag. Returns whether reasoning follows."""
        space = yield from self._space()
        if (yield from self.source.accept(*self.format.starts)):
            yield from self._newline()
            return True
        (self.emit_reasoning if certain else self.emit_content)(space)
        return certain

    def _reason(self) -> Steps[None]:
        tags = self.format.ends
        if self.format.newlines:
            tags += tuple("\n" + tag for tag in tags)
        yield from self.source.until(tags, self.emit_reasoning)

    def _unwrap(self, wrap: tuple[str, str]) -> Steps[None]:
        space = yield from self._space()
        if not (yield from self.source.accept(wrap[0])):
            self.emit_content(space)
            return
        yield from self._newline()
        yield from self.source.until(("\n" + wrap[1], wrap[1]), self.emit_content)

    def _newline(self) -> Steps[None]:
        if self.format.newlines:
            yield from self.source.accept("\n")

    def _space(self) -> Steps[str]:
        """Not too much white space."""
        read = ""
        while len(read) < MAX_SPACE:
            character = yield from self.source.peek()
            if not character or character not in _SPACE:
                break
            read += self.source.take(1)
        return read
