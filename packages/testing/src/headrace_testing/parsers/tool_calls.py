"""Conformance suite of tool-call parsers. Inherit, and say how calls look in your format::

class TestHermes(ToolCallParserConformance):
    parser = HermesToolParser

    def write_call(self, name, arguments):
        return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'

    broken = ["<tool_call>{]</tool_call>"]
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from headrace_core import plugins
from headrace_core.grammar import Grammar, GrammarSpec
from headrace_core.text import ParsedDelta, ToolCall, ToolCallParser
from headrace_testing.guards.linear_time import assert_linear
from headrace_testing.sampling import turns

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
    ("run", {"text": 'quotes " and \\ and {braces} and [brackets] and <angles> </a>'}),
    ("run", {"text": "größer 東京 \N{GRINNING FACE}", "a": {"b": {"c": []}}}),
]
"""Calls that must be found, with hard arguments."""

FORCED_TOOLS: Mapping[str, Mapping[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "text": {"type": "string"}},
        "required": ["a", "text"],
        "additionalProperties": False,
    },
    "look_up": {"type": "object", "properties": {}, "additionalProperties": False},
}
"""Tools of which an answer must call some: name -> schema of the arguments."""

FORCED_CALLS: Sequence[tuple[str, Mapping[str, Any]]] = [
    ("add", {"a": 17, "text": "two words"}),
    ("look_up", {}),
]
"""Calls that their schemas allow."""

NUM_SPLITS = int(os.environ.get("HEADRACE_TEST_SPLITS", "1000"))
"""Random texts in random pieces per format."""

NUM_WALKS = 20
"""Random texts that a forced form admits, per format."""

Answer = tuple[str, list[ToolCall]]


class ToolCallParserConformance:
    """Inherit as ``Test...`` and set :attr:`parser`, :attr:`broken` and :meth:`write_call`."""

    parser: type[ToolCallParser]
    broken: ClassVar[Sequence[str]] = ()
    """Texts that resemble calls and are none: no name, no arguments, wrong nesting ..."""
    alphabet: ClassVar[Sequence[str]] = ()
    """Fragments of the format (tags, braces), of which random texts are made."""
    forces_one: ClassVar[bool] = False
    """A forced answer is one call, however many are asked for."""
    drops: ClassVar[Sequence[str]] = ()
    """Marks that are left out of content even if no call was found."""

    def write_call(self, name: str, arguments: str) -> str:
        """A call as the model writes it. ``arguments`` is JSON text."""
        raise NotImplementedError

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Several calls as the model writes them, one after the other."""
        return "\n".join(self.write_call(*call) for call in calls)

    def write_forced(self, calls: Sequence[tuple[str, str]]) -> str:
        """Several calls as the model writes them where it must call."""
        return self.write_calls(calls)

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
        calls = [(name, json.dumps(arguments)) for name, arguments in CALLS]
        for text in (
            "Let me see." + "".join(self.write_call(*call) for call in calls),
            "Let me see. \n" + self.write_calls(calls),
        ):
            content, found = self.read([text])
            assert content == "Let me see."
            assert [(c.name, json.loads(c.arguments)) for c in found] == [
                (name, dict(arguments)) for name, arguments in CALLS
            ]
            self.split_everywhere(text[:400])

    def test_text_without_calls_is_content(self) -> None:
        for text in ("", "Hello.", "  a < b > c {x} [y]\n", "\n\n", "<b>no</b>", "{} [] ```x```"):
            assert self.read([text]) == (text, [])
            self.split_everywhere(text)

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

    def test_a_truncated_call_is_content_or_a_beginning(self) -> None:
        """Nothing of it was given away, or a beginning of what the whole call gives."""
        text = self.write_call("add", '{"a": [1, {"b": "c"}], "text": "x"}')
        _, (whole,) = self.read([text])
        for end in range(1, len(text)):
            content, calls = self.read([text[:end]])
            if not calls:
                assert _without(content, self.drops) == _without(text[:end], self.drops)
                continue
            assert (content, [call.name for call in calls]) == ("", ["add"])
            assert whole.arguments.startswith(calls[0].arguments), f"cut after {end}"

    @turns(3)
    def test_a_call_behind_a_truncated_one(self) -> None:
        """The format decides the result, and the cuts do not change it."""
        good = self.write_call("add", '{"a": 1}')
        text = self.write_call("run", '{"a": [1]}')
        for end in range(1, len(text)):
            pieces = [text[:end] + good[:3], good[3:]]
            assert self.read([*text[:end], *good]) == self.read([text[:end] + good])
            assert self.read(pieces) == self.read([text[:end] + good])

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

    def test_ids_are_stable(self) -> None:
        parser = self.make()
        _, calls = parser.parse(self.write_calls([("add", '{"a": 1}'), ("run", "{}")]))
        ids = [parser.call_id(index, call.name) for index, call in enumerate(calls)]
        assert ids == [parser.call_id(index, call.name) for index, call in enumerate(calls)]
        assert None in ids or len(set(ids)) == len(ids)

    def test_the_frame_of_a_call_is_read_back(self) -> None:
        frame = self.parser.call_delimiters("add")
        if frame is None:
            return
        assert frame.before.startswith(frame.trigger)
        text = frame.before + '{"a": [1]}' + frame.after
        assert self.read([text]) == ("", [ToolCall("add", '{"a": [1]}')])

    def _forced(self, most: int) -> Grammar:
        """The compiled form of an answer that must call."""
        form = self.parser.forced_structural_tag(FORCED_TOOLS, most=most)
        if form is None:
            pytest.skip("the format has no structural tag of forced calls")
        if "guidance" not in plugins.installed("headrace.grammar_backends"):
            pytest.skip("no grammar backend is installed")
        from headrace_testing.engine.grammars import byte_vocabulary

        made = plugins.load("headrace.grammar_backends", "guidance")(byte_vocabulary())
        spec = GrammarSpec("guidance", "structural_tag", json.dumps({"format": form}))
        assert made.refuse(spec) == []
        grammar: Grammar = made.compile(spec)
        return grammar

    def test_calls_as_the_model_writes_them_may_be_forced(self) -> None:
        calls = [(name, json.dumps(arguments)) for name, arguments in FORCED_CALLS]
        grammar = self._forced(1)
        for name, arguments in calls:
            text = self.write_call(name, arguments)
            assert _is_sentence(grammar, text), text
            content, found = self.read([text])
            assert content == ""
            assert [(c.name, json.loads(c.arguments)) for c in found] == [
                (name, json.loads(arguments))
            ]

    def test_the_number_of_forced_calls_is_bounded(self) -> None:
        one = self.write_call("add", json.dumps(FORCED_CALLS[0][1]))
        two = self.write_forced([(name, json.dumps(given)) for name, given in FORCED_CALLS])
        assert not _is_sentence(self._forced(1), two)
        assert not _is_sentence(self._forced(1), one + one)
        if self.forces_one:
            return
        assert _is_sentence(self._forced(2), two), two
        twice = [(name, json.dumps(given)) for name, given in FORCED_CALLS] * 2
        assert not _is_sentence(self._forced(3), self.write_forced(twice))
        assert _is_sentence(self._forced(4), self.write_forced(twice))

    def test_a_forced_answer_is_nothing_but_calls(self) -> None:
        grammar = self._forced(1)
        call = self.write_call("add", json.dumps(FORCED_CALLS[0][1]))
        other = self.write_call("run", "{}")
        wrong = self.write_call("add", '{"a": "none", "text": ""}')
        space = " " * 40
        for text in ("", "Sure. " + call, call + "Done.", space + call, call + space, other, wrong):
            assert not _is_sentence(grammar, text), text
        for end in range(len(call.rstrip()) - 1):
            assert not _is_sentence(grammar, call[:end]) or self.read([call[:end]])[1], call[:end]

    @turns(3)
    def test_what_a_forced_structural_tag_admits_is_read_as_calls(self) -> None:
        grammar, found = self._forced(2), 0
        from headrace_testing.engine.grammars import byte_vocabulary, walk  # needs numpy

        for seed in range(NUM_WALKS):
            text = walk(grammar, byte_vocabulary(), seed, 600)
            if text is None:
                continue
            content, calls = self.read([text.decode()])
            assert content == "", text
            assert 1 <= len(calls) <= 2, text
            for call in calls:
                assert json.loads(call.arguments).keys() == set(
                    FORCED_TOOLS[call.name].get("required", ())
                ), text
            found += 1
        assert found, "no walk came to an end"

    @turns(3)
    def test_time_is_linear(self) -> None:
        """Eight times the text takes about eight times as long, whatever the text."""
        start = self.write_call("add", '{"a": 1}')[:-3]
        inside = self.write_call("add", '{"a": [1]}').partition("1")[0]
        for unit, first in ((start, ""), ("[", inside), (" ", ""), ("\\", inside), ('"', inside)):
            assert_linear(self._read_both, _repeated(unit, first))

    def _read_both(self, text: str) -> None:
        """In pieces, and in one."""
        content, _ = self.read(text[at : at + 11] for at in range(0, len(text), 11))
        assert len(content) <= len(text)
        self.read([text])

    @turns(3)
    def test_random_texts_in_random_pieces(self) -> None:
        """Cuts do not matter, and nothing but white space is lost beside calls."""
        seeded = random.Random(self.parser.__name__)
        call = self.write_call("add", '{"a": [1, "b"]}')
        parts = [call, call[: len(call) // 2], call[len(call) // 2 :], " ", "\n", "text", "é東"]
        parts += [*self.alphabet, '"', "\\", "{", "}", "<", "[", "]", ",", ":", "1", '{"a": 01}']
        for _ in range(NUM_SPLITS):
            text = "".join(seeded.choices(parts, k=seeded.randint(0, 7)))
            if seeded.random() < 0.5:
                at = seeded.randint(0, len(call))
                text = call[:at] + text + call[at:]
            content, calls = whole = self.read([text])
            cuts = sorted(seeded.randint(0, len(text)) for _ in range(seeded.randint(1, 12)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            assert self.read(pieces) == whole, pieces
            if not calls:
                assert _without(content, self.drops) == _without(text, self.drops), text


def _is_sentence(grammar: Grammar, text: str) -> bool:
    """True if a grammar of bytes admits a text, new lines at its end aside."""
    matcher = grammar.matcher()
    return matcher.advance(list(text.rstrip("\n").encode())) and matcher.complete


def _repeated(unit: str, first: str) -> Callable[[int], str]:
    return lambda size: first + unit * (size // len(unit))


def _without(text: str, tags: Sequence[str]) -> str:
    for tag in tags:
        text = text.replace(tag, "")
    return text


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
