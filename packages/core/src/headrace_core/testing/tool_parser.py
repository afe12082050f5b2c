"""What every tool-call parser must do. Inherit, and say how calls look in your format::

class TestHermes(ToolCallParserConformance):
    parser = HermesToolParser

    def write_call(self, name, arguments):
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    broken = ["<tool_call>{]</tool_call>"]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.text import ParsedDelta, ToolCall, ToolCallParser

TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {}, "text": {}, "list": {}}},
        },
    }
    for name in ("look_up", "add", "run")
]
"""The tools that parsers are made with."""

CALLS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("look_up", {}),
    ("add", {"a": 1, "text": "x", "list": [1, 2.5, None, True]}),
    ("run", {"text": 'quotes " and \\ and {braces} and [brackets] and <angles>'}),
    ("run", {"text": "größer 東京 \N{GRINNING FACE}", "a": {"b": {"c": []}}}),
]
"""Calls that must be found, with hard arguments."""

Answer = tuple[str, list[ToolCall]]


class ToolCallParserConformance:
    """Inherit as ``Test...`` and set :attr:`parser`, :attr:`broken` and :meth:`write_call`."""

    parser: type[ToolCallParser]
    broken: ClassVar[Sequence[str]] = ()
    """Texts that resemble calls and are none: bad JSON, no name, wrong nesting ..."""
    alphabet: ClassVar[Sequence[str]] = ()
    """Fragments of the format (tags, braces), of which random texts are made."""

    def write_call(self, name: str, arguments: str) -> str:
        """A call as the model writes it. ``arguments`` is JSON text."""
        raise NotImplementedError

    def make(self) -> ToolCallParser:
        """A fresh parser."""
        return self.parser(TOOLS)

    def read(self, pieces: Iterable[str]) -> Answer:
        """Feed pieces and finish; checks the order and the form of deltas on the way."""
        parser = self.make()
        deltas = [parser.feed(piece) for piece in pieces]
        deltas.append(parser.finish())
        return "".join(delta.content for delta in deltas), _calls(deltas)

    def split_everywhere(self, text: str) -> None:
        """The whole text, its characters, and its cut at each place give one answer."""
        whole = self.read([text])
        assert self.read(list(text)) == whole
        for at in range(len(text) + 1):
            assert self.read([text[:at], text[at:]]) == whole, f"cut at {at}: {text[at:]!r}"

    @pytest.mark.parametrize(("name", "arguments"), CALLS)
    def test_a_call_is_found(self, name: str, arguments: Mapping[str, Any]) -> None:
        written = self.write_call(name, json.dumps(arguments, ensure_ascii=False))
        content, calls = self.read([written])
        assert content == ""
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [(name, dict(arguments))]

    def test_calls_and_text_keep_their_order(self) -> None:
        text = "Let me see." + "".join(self.write_call(n, json.dumps(a)) for n, a in CALLS)
        content, calls = self.read([text])
        assert content == "Let me see."
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            (name, dict(arguments)) for name, arguments in CALLS
        ]

    def test_text_without_calls_is_content(self) -> None:
        for text in ("", "Hello.", "  a < b > c {x} [y]\n", "\n\n"):
            assert self.read([text]) == (text, [])

    def test_parse_equals_pieces(self) -> None:
        text = "Yes: " + self.write_call("add", '{"a": 1}')
        assert self.make().parse(text) == self.read(list(text))

    @pytest.mark.parametrize(("name", "arguments"), CALLS)
    def test_every_split_equals_the_whole(self, name: str, arguments: Mapping[str, Any]) -> None:
        call = self.write_call(name, json.dumps(arguments, ensure_ascii=False))
        self.split_everywhere(f"Before {call}\n{call} after")

    def test_malformed_text_is_content(self) -> None:
        assert self.broken, "list texts that resemble calls"
        for text in self.broken:
            content, calls = self.read([text])
            assert (content, calls) == (text, [])
            self.split_everywhere(text)

    def test_a_truncated_call_is_content(self) -> None:
        call = self.write_call("add", '{"a": [1, {"b": "c"}]}')
        for end in range(1, len(call)):
            assert self.read([call[:end]]) == (call[:end], []), f"cut after {end}"

    def test_a_good_call_after_a_broken_one_is_found(self) -> None:
        good = self.write_call("add", '{"a": 1}')
        for text in self.broken:
            content, calls = self.read([text + " then " + good])
            assert content.startswith(text)
            assert [call.name for call in calls] == ["add"], text

    def test_objects_are_independent(self) -> None:
        first, second = self.make(), self.make()
        call = self.write_call("add", '{"a": 1}')
        first.feed(call[: len(call) // 2])
        assert second.parse("plain") == ("plain", [])

    def test_long_output_ends(self) -> None:
        """Half a megabyte of beginnings, fed in small pieces: quadratic work would not end."""
        start = self.write_call("add", '{"a": 1}')[:-3]
        texts = (start * (500_000 // len(start)), start + "[" * 500_000, " " * 500_000)
        for text in texts:
            content, _ = self.read(text[i : i + 7] for i in range(0, len(text), 7))
            assert len(content) <= len(text)

    @settings(max_examples=1000, deadline=None)
    @given(data=st.data())
    def test_random_text_in_random_pieces(self, data: st.DataObject) -> None:
        """Cuts do not matter, and nothing but white space is lost beside calls."""
        call = self.write_call("add", '{"a": 1}')
        parts = [call, call[: len(call) // 2], call[len(call) // 2 :], " ", "\n", "text", "é東"]
        parts += [*self.alphabet, '"', "\\", "{", "}", "<"]
        text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=8)))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
        content, calls = self.read(pieces)
        assert (content, calls) == self.read([text])
        if not calls:
            assert content == text


def _calls(deltas: Iterable[ParsedDelta]) -> list[ToolCall]:
    """Put pieces together; indices count up from 0 and only a first piece has a name."""
    names: list[str] = []
    arguments: list[str] = []
    for delta in deltas:
        for piece in delta.tool_calls:
            if piece.index == len(names):
                assert piece.name, "a call's first piece carries its name"
                names.append(piece.name)
                arguments.append(piece.arguments)
            else:
                assert piece.index == len(names) - 1, "calls come in order"
                assert piece.name is None, "a call's name comes once"
                arguments[-1] += piece.arguments
    return [ToolCall(*call) for call in zip(names, arguments)]
