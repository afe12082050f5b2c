"""gpt-oss writes messages: ``<|channel|>commentary to=functions.F<|message|>{...}<|call|>``.

A message has a header (role, recipient, channel, type of content) and a body, which ends with
``<|end|>``, ``<|call|>`` or ``<|return|>``, or with the next message. The format is described in
OpenAI's "harmony response format". Text outside of any message is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_core.text import ParsedDelta
from headrace_server.source import Broken, Steps
from headrace_server.tool_parsers import forms
from headrace_server.tool_parsers.machine import Machine, drop

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
OPENS = (START, CHANNEL)
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 1024
"""Characters of a header; more is no message."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a message says of itself."""

    channel: str = ""
    recipient: str = ""
    """Who is called: ``functions.F``, or a built-in tool; "" for a message to the user."""

    @property
    def is_reasoning(self) -> bool:
        """Neither for the user nor for a tool."""
        return self.channel == "analysis" and not self.recipient

    @property
    def function(self) -> str:
        """The name of the function that is called."""
        return self.recipient.removeprefix("functions.")


def read_header(mark: str, text: str) -> Header:
    """Of a header's text behind its opening mark."""
    words = (mark + text).replace("<|constrain|>", " ").replace(START, " ")
    role, _, channel = words.partition(CHANNEL)
    names = channel.split()
    recipients = [w.removeprefix("to=") for w in [*role.split(), *names] if w.startswith("to=")]
    first = names[0] if names and not names[0].startswith("to=") else ""
    return Header(first, recipients[0] if recipients else "")


class OpenAIToolParser(Machine):
    """gpt-oss: see the module. What the model thinks is given as reasoning."""

    needs_special_tokens = True
    forms_include_reasoning = True
    opens = OPENS
    closes = ENDS

    @classmethod
    def strict_form(cls, tools: forms.Tools) -> forms.Form:
        return forms.free_text(
            OPENS, [*_messages("", tools), *_messages(f"{START}assistant", tools)]
        )

    @classmethod
    def forced_form(cls, tools: Mapping[str, Mapping[str, Any]], *, most: int) -> forms.Form:
        """One call, whatever ``most`` says: a call ends the model's output. It may think before.

        The prompt may end with the head of the message, so that an answer may begin without it.
        """
        role = forms.const(f"{START}assistant")
        thought = forms.sequence(
            forms.either(role, forms.const("")),
            forms.tag(f"{CHANNEL}analysis{MESSAGE}", forms.FREE, ENDS[0]),
        )
        before = forms.sequence(forms.either(thought, forms.const("")), role)
        return forms.either(
            *(_forced_call(*tool, [f"{CHANNEL}commentary", ""]) for tool in tools.items()),
            forms.sequence(
                before,
                forms.either(
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

    def calls(self, mark: str) -> Steps[None]:
        while mark in OPENS:
            self.source.held = [mark]
            mark = yield from self._message(mark)

    def _message(self, mark: str) -> Steps[str]:
        """Read a message behind its opening mark. Returns the mark that ended it."""
        source = self.source
        text, found = yield from source.before((MESSAGE, START, *ENDS), limit=MAX_HEADER)
        if found in ENDS:
            raise Broken
        if found == START:  # what came before it is no message
            self.say(but=START)
            return found
        header = read_header(mark, text)
        put = self.tell
        if header.is_reasoning:
            put = self._think
        elif header.recipient:
            yield from source.space()
            if end := (yield from source.accept(*ENDS)):
                self.whole_call(header.function, "{}")
                return end
            beginning = yield from source.peek()
            if not beginning:
                raise Broken
            if beginning == "{":
                yield from self.object_arguments(header.function)
                put = drop
        source.held = None
        return (yield from source.until(OPENS + ENDS, put))


_CONSTRAINS = ("", "<|constrain|>json", " <|constrain|>json")
"""What may stand between a call's recipient and its body."""
_BUILT_IN = r"(browser|python|container)(\.[a-z_]{1,32})?( ?[a-z]{0,16})?"


def _forced_call(name: str, schema: Mapping[str, Any], *orders: list[str]) -> forms.Form:
    """A message to one function, behind the message's role.

    Args:
        orders: what may stand before the recipient, and behind it.
    """
    to = f" to=functions.{name}"
    head = forms.either(*(forms.const(first + to + then) for first, then in orders))
    says = forms.either(*map(forms.const, _CONSTRAINS))
    return forms.sequence(head, says, forms.tag(MESSAGE, forms.schema_form(schema), ["", ENDS[1]]))


def _messages(before: str, tools: forms.Tools) -> list[forms.Form]:
    """The messages that a model may write: what it thinks and says, calls of the tools, and calls
    of tools that are built in. The tokens that end an output end its last message.
    """
    ends = [(f"{CHANNEL}analysis{MESSAGE}", ENDS[0]), (f"{CHANNEL}commentary{MESSAGE}", ENDS[0])]
    found = [forms.tag(before + begin, forms.FREE, end) for begin, end in ends]
    found.append(forms.tag(f"{before}{CHANNEL}final{MESSAGE}", forms.FREE))
    for name, schema in tools.items():
        arguments, to = forms.schema_form(schema), f" to=functions.{name}"
        headers = [f"{CHANNEL}commentary{to}{says}" for says in _CONSTRAINS]
        if before:
            headers += [f"{to}{CHANNEL}commentary{says}" for says in _CONSTRAINS]
        found += [forms.tag(before + one + MESSAGE, arguments, ["", ENDS[1]]) for one in headers]
    built_in = forms.sequence(forms.regex(_BUILT_IN), forms.tag(MESSAGE, forms.FREE))
    found += [forms.tag(f"{before}{CHANNEL}{channel} to=", built_in)
              for channel in ("analysis", "commentary")]  # fmt: skip
    return found
