"""Formats with marks: ``<think>reasoning</think>answer`` and its relatives.

Whether an answer begins with reasoning is decided, in this order, by the end of the prompt (a
template may have opened the reasoning, or closed it), by the switch of thinking that the template
knows, and by the text itself: some formats begin with the opening mark, in others it may be
missing.

Nothing is trimmed but what belongs to the marks: reasoning and answer together are the text
without them. Reasoning that is cut off before its closing mark stays reasoning, since it was
streamed as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace_server.reasoning_parsers.machine import ReasoningMachine
from headrace_server.source import Steps

MAX_SPACE = 64
"""More white space than this at the beginning is an answer's own."""
_OFF = (False, 0, "false", "False", "off", "no", "0")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of a format, and how it begins."""

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    begun: bool = False
    """Answers begin with reasoning, whether the opening mark comes or not."""
    switches: tuple[str, ...] = ()
    """Template variables that turn thinking on and off; the first that is given counts."""
    thinks: bool = True
    """Whether the model thinks if none of them is given."""
    wrap: tuple[str, str] | None = None
    """Marks that may stand around the answer."""
    newlines: bool = False
    """One new line on the inside of each mark belongs to it."""


class MarkedReasoningParser(ReasoningMachine):
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
        yield from self.source.until((), self.tell)

    def _opened(self) -> bool | None:
        """Whether the answer begins with reasoning; None: it does if the opening mark comes."""
        form = self.format
        prompt = self.context.prompt_end.rstrip()
        if prompt.endswith(form.starts):
            return True
        if prompt.endswith(form.ends):
            return False
        if not form.begun:
            return None
        return self.may_reason(self.context.chat_template_kwargs)

    @classmethod
    def may_reason(cls, chat_template_kwargs: Mapping[str, Any]) -> bool:
        form = cls.format
        if not form.switches:
            return True
        given = [chat_template_kwargs[n] for n in form.switches if n in chat_template_kwargs]
        return form.thinks if not given else given[0] not in _OFF

    def _begin(self, *, certain: bool) -> Steps[bool]:
        """White space and the opening mark. Returns whether reasoning follows."""
        space = yield from self._space()
        if (yield from self.source.accept(*self.format.starts)):
            yield from self._newline()
            return True
        (self.think if certain else self.tell)(space)
        return certain

    def _reason(self) -> Steps[None]:
        marks = self.format.ends
        if self.format.newlines:
            marks += tuple("\n" + mark for mark in marks)
        yield from self.source.until(marks, self.think)

    def _unwrap(self, wrap: tuple[str, str]) -> Steps[None]:
        space = yield from self._space()
        if not (yield from self.source.accept(wrap[0])):
            self.tell(space)
            return
        yield from self._newline()
        yield from self.source.until(("\n" + wrap[1], wrap[1]), self.tell)

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


class DeepSeekR1ReasoningParser(MarkedReasoningParser):
    """DeepSeek R1, QwQ, Kimi K2 Thinking: the opening mark may be missing."""

    format = ReasoningFormat(begun=True)


class DeepSeekV3ReasoningParser(MarkedReasoningParser):
    """DeepSeek V3.1: thinks if asked to."""

    format = ReasoningFormat(begun=True, switches=("thinking", "enable_thinking"), thinks=False)


class Holo2ReasoningParser(MarkedReasoningParser):
    """Holo 2: thinks unless asked not to."""

    format = ReasoningFormat(begun=True, switches=("thinking", "enable_thinking"))


class Glm45ReasoningParser(MarkedReasoningParser):
    """GLM 4.5 to 4.7: the opening mark is in the text or in the prompt."""

    needs_special_tokens = True


class GraniteReasoningParser(MarkedReasoningParser):
    """Granite 3.2: marks are sentences, so no constraint can begin behind them."""

    start_marker = end_marker = ""
    format = ReasoningFormat(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
    )


class HunyuanReasoningParser(MarkedReasoningParser):
    """Hunyuan A13B: the answer stands between marks, too."""

    needs_special_tokens = True
    format = ReasoningFormat(wrap=("<answer>", "</answer>"), newlines=True)


class Ernie45ReasoningParser(MarkedReasoningParser):
    """ERNIE 4.5: the opening mark is in the prompt; the answer may stand between marks."""

    needs_special_tokens = True
    format = ReasoningFormat(begun=True, wrap=("<response>", "</response>"), newlines=True)


class MiniMaxM2ReasoningParser(MarkedReasoningParser):
    """MiniMax M2: the opening mark is in the prompt."""

    format = ReasoningFormat(begun=True)


class MiniMaxM2AppendThinkReasoningParser(ReasoningMachine):
    """MiniMax M2: nothing is split; the mark that the prompt held is put before the answer."""

    start_marker = "<think>"
    end_marker = "</think>"

    def read(self) -> Steps[None]:
        if (yield from self.source.peek()):
            self.tell("<think>")
        yield from self.source.until((), self.tell)


class MistralReasoningParser(MarkedReasoningParser):
    """Magistral: ``[THINK]`` and ``[/THINK]``."""

    needs_special_tokens = True
    start_marker = "[THINK]"
    end_marker = "[/THINK]"
    format = ReasoningFormat(starts=("[THINK]",), ends=("[/THINK]",))


class Olmo3ReasoningParser(MarkedReasoningParser):
    """Olmo 3 Think: the opening mark is in the prompt; both are ordinary text."""

    format = ReasoningFormat(begun=True)


class SeedOssReasoningParser(MarkedReasoningParser):
    """Seed-OSS: marks of its own."""

    needs_special_tokens = True
    start_marker = "<seed:think>"
    end_marker = "</seed:think>"
    format = ReasoningFormat(starts=("<seed:think>",), ends=("</seed:think>",), begun=True)


class Step3ReasoningParser(MarkedReasoningParser):
    """Step 3: the opening mark is in the prompt."""

    needs_special_tokens = True
    format = ReasoningFormat(begun=True)
