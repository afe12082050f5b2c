"""gpt-oss: calls are messages to ``functions.F``; see :mod:`headrace_server.tool_parsers.harmony`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.text import ParsedDelta
from headrace_server.parsing.text_scanner import ParseError, Steps
from headrace_server.tool_parsers import structural_tags
from headrace_server.tool_parsers.harmony import (
    CHANNEL,
    ENDS,
    MAX_HEADER,
    MESSAGE,
    OPENS,
    START,
    read_header,
)
from headrace_server.tool_parsers.streaming_parser import StreamingParser, drop


class OpenAIToolParser(StreamingParser):
    """gpt-oss: calls are messages to functions. What the model thinks is given as reasoning."""

    needs_special_tokens = True
    structural_tags_include_reasoning = True
    opens = OPENS
    closes = ENDS

    @classmethod
    def strict_structural_tag(cls, tools: structural_tags.Tools) -> structural_tags.StructuralTag:
        return structural_tags.free_text(
            OPENS, [*_messages("", tools), *_messages(f"{START}assistant", tools)]
        )

    @classmethod
    def forced_structural_tag(
        cls, tools: Mapping[str, Mapping[str, Any]], *, most: int
    ) -> structural_tags.StructuralTag:
        """One call, whatever ``most`` says: a call ends the model's output. It may think before.

        The prompt may end with the head of the message, so that an answer may begin without it.
        """
        role = structural_tags.const(f"{START}assistant")
        thought = structural_tags.sequence(
            structural_tags.either(role, structural_tags.const("")),
            structural_tags.tag(f"{CHANNEL}analysis{MESSAGE}", structural_tags.FREE, ENDS[0]),
        )
        before = structural_tags.sequence(
            structural_tags.either(thought, structural_tags.const("")), role
        )
        return structural_tags.either(
            *(_forced_call(*tool, [f"{CHANNEL}commentary", ""]) for tool in tools.items()),
            structural_tags.sequence(
                before,
                structural_tags.either(
                    *(
                        _forced_call(
                            *tool, [f"{CHANNEL}commentary", ""], ["", f"{CHANNEL}commentary"]
                        )
                        for tool in tools.items()
                    )
                ),
            ),
        )

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._reasoning: list[str] = []

    def feed(self, text: str) -> ParsedDelta:
        return self._with_reasoning(super().feed(text))

    def finish(self) -> ParsedDelta:
        return self._with_reasoning(super().finish())

    def _with_reasoning(self, delta: ParsedDelta) -> ParsedDelta:
        delta.reasoning, self._reasoning = "".join(self._reasoning), []
        return delta

    def _think(self, text: str) -> None:
        self._reasoning.append(text)

    def calls(self, tag: str) -> Steps[None]:
        while tag in OPENS:
            self.source.held = [tag]
            tag = yield from self._message(tag)

    def _message(self, tag: str) -> Steps[str]:
        """Read a message behind its opening tag. Returns the tag that ended it."""
        source = self.source
        text, found = yield from source.before((MESSAGE, START, *ENDS), limit=MAX_HEADER)
        if found in ENDS:
            raise ParseError
        if found == START:  # what came before it is no message
            self.say(but=START)
            return found
        header = read_header(tag, text)
        put = self.emit_content
        if header.is_reasoning:
            put = self._think
        elif header.recipient:
            yield from source.space()
            if end := (yield from source.accept(*ENDS)):
                self.whole_call(header.function, "{}")
                return end
            beginning = yield from source.peek()
            if not beginning:
                raise ParseError
            if beginning == "{":
                yield from self.object_arguments(header.function)
                put = drop
        source.held = None
        return (yield from source.until(OPENS + ENDS, put))


_CONSTRAINS = ("", "<|constrain|>json", " <|constrain|>json")
"""Texts that may stand between a call's recipient and its body."""
_BUILT_IN = r"(browser|python|container)(\.[a-z_]{1,32})?( ?[a-z]{0,16})?"


def _forced_call(
    name: str, schema: Mapping[str, Any], *orders: list[str]
) -> structural_tags.StructuralTag:
    """A message to one function, behind the message's role.

    Args:
        orders: what may stand before the recipient, and behind it.
    """
    to = f" to=functions.{name}"
    head = structural_tags.either(
        *(structural_tags.const(first + to + then) for first, then in orders)
    )
    says = structural_tags.either(*map(structural_tags.const, _CONSTRAINS))
    return structural_tags.sequence(
        head, says, structural_tags.tag(MESSAGE, structural_tags.json_schema(schema), ["", ENDS[1]])
    )


def _messages(before: str, tools: structural_tags.Tools) -> list[structural_tags.StructuralTag]:
    """The messages that a model may write: what it thinks and says, calls of the tools, and calls
    of tools that are built in. The tokens that end an output end its last message.
    """
    ends = [(f"{CHANNEL}analysis{MESSAGE}", ENDS[0]), (f"{CHANNEL}commentary{MESSAGE}", ENDS[0])]
    found = [structural_tags.tag(before + begin, structural_tags.FREE, end) for begin, end in ends]
    found.append(structural_tags.tag(f"{before}{CHANNEL}final{MESSAGE}", structural_tags.FREE))
    for name, schema in tools.items():
        arguments, to = structural_tags.json_schema(schema), f" to=functions.{name}"
        headers = [f"{CHANNEL}commentary{to}{says}" for says in _CONSTRAINS]
        if before:
            headers += [f"{to}{CHANNEL}commentary{says}" for says in _CONSTRAINS]
        found += [
            structural_tags.tag(before + one + MESSAGE, arguments, ["", ENDS[1]]) for one in headers
        ]
    built_in = structural_tags.sequence(
        structural_tags.regex(_BUILT_IN), structural_tags.tag(MESSAGE, structural_tags.FREE)
    )
    found += [structural_tags.tag(f"{before}{CHANNEL}{channel} to=", built_in)
              for channel in ("analysis", "commentary")]  # fmt: skip
    return found
