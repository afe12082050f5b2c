"""What tool-call formats are built of: cursor, JSON, literals, types of values; and their rules."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

import ijson  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace_server.reasoning_parsers
import headrace_server.tool_parsers
from headrace_server.parsing.text_scanner import ParseError, Steps, TextScanner
from headrace_server.tool_parsers.formats.hermes import HermesToolParser
from headrace_server.tool_parsers.formats.pythonic import PythonicToolParser
from headrace_server.tool_parsers.json_values import MAX_DEPTH, JsonScanner
from headrace_server.tool_parsers.python_literals import read_literal
from headrace_server.tool_parsers.schema_values import SchemaValues
from headrace_testing.guards.linear_time import assert_linear

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
BROKEN_JSON = st.lists(
    st.sampled_from(['"', "\\", "{", "}", "[", "]", ",", ":", " ", "1", "0", "-", ".", "e", "a",
                     "true", "null", "\\u00e9", '"k"', "\n"]),
    max_size=10,
).map("".join)  # fmt: skip


def scan(text: str) -> tuple[str, str, bool]:
    """(what belongs to the value, the rest, whether the value is complete), in pieces of one."""
    scanner, read = JsonScanner(), ""
    for at, character in enumerate(text):
        count, spelling = scanner.scan(character)
        read += spelling
        if not count or scanner.broken:
            return read, text[at:], scanner.done
        if scanner.done:
            return read, text[at + 1 :], True
    return read, "", scanner.finish()


@pytest.mark.req("SEC-15")
class TestJsonScanner:
    @settings(max_examples=150, deadline=None)
    @given(JSON, st.sampled_from([None, 1, "\t"]), st.booleans(), st.sampled_from([" x", "}", ","]))
    def test_it_ends_where_the_value_ends(
        self, value: Any, indent: Any, ascii_only: bool, rest: str
    ) -> None:
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        assert scan(text + rest) == (text, rest, True)

    @settings(max_examples=200, deadline=None)
    @given(BROKEN_JSON)
    def test_it_takes_what_json_takes(self, text: str) -> None:
        read, rest, done = scan(text)
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            assert not done or rest.strip()
            return
        assert done
        assert not rest.strip()
        assert json.loads(read) == value

    @settings(max_examples=150, deadline=None)
    @given(BROKEN_JSON)
    def test_cuts_do_not_matter(self, text: str) -> None:
        scanner = JsonScanner()
        count, spelling = scanner.scan(text)
        assert (spelling, text[count:], scanner.finish()) == scan(text)

    @settings(max_examples=200, deadline=None)
    @given(st.dictionaries(st.text(max_size=3), JSON, min_size=1, max_size=3))
    def test_events_agree_with_another_incremental_reader(self, value: dict[str, Any]) -> None:
        text = json.dumps(value)
        assert scan(text)[2]
        events = list(ijson.get_backend("python").basic_parse(text.encode()))
        assert events[0][0] == "start_map"
        assert events[-1][0] == "end_map"

    def test_nesting_has_a_limit(self) -> None:
        deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
        assert scan(deep) == (deep, "", True)
        assert scan("[" + deep + "]")[:2] == ("[" * MAX_DEPTH, "[" + "]" * (MAX_DEPTH + 1))


@pytest.mark.req("SEC-15")
class TestLiterals:
    @settings(max_examples=200, deadline=None)
    @given(JSON)
    def test_what_python_writes(self, value: Any) -> None:
        spelled = read_literal(repr(value))
        assert spelled is not None
        assert json.loads(spelled) == value

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.sampled_from(
                ["'", '"', "\\", "n", "x41", "u00e9", "[", "]", "(", ")", "{", "}", ",", ":", " ",
                 "1", "-", ".5", "e3", "True", "None", "a"]
            ),
            max_size=9,
        ).map("".join)
    )  # fmt: skip
    def test_it_takes_no_more_than_python_and_json(self, text: str) -> None:
        spelled = read_literal(text)
        if spelled is not None:
            json.loads(spelled)

    @pytest.mark.parametrize(
        ("text", "spelled"),
        [
            ("'it\\'s'", '"it\'s"'),
            ('"\\x41\\u00e9\\U0001F600\\q"', '"Aé😀\\\\q"'),
            ("('a' 'b', )", '["ab"]'),
            ("{'a': 1, 2: true,}", '{"a": 1, "2": true}'),
            ("007", "7"),
            ("1_000", "1000"),
            (".5", "0.5"),
            ("1.", "1.0"),
            ("+1e3", "1e3"),
            ("-0.50", "-0.50"),
            ("9" * 5000, "9" * 5000),
            ("'\\ud83d'", '"\\ud83d"'),
        ],
    )
    def test_spellings(self, text: str, spelled: str) -> None:
        assert read_literal(text) == spelled

    @pytest.mark.parametrize(
        "text",
        ["", "a", "f()", "1+1", "1e999", "[1", "'a", "{1}", "{[]: 1}", "__import__('os')", "1 2",
         "[,]", "'\\x4'", "'\\U00110000'", "--1", "1.2.3", "[" * 100 + "]" * 100],
    )  # fmt: skip
    def test_what_is_no_literal(self, text: str) -> None:
        assert read_literal(text) is None


SCHEMA = {
    "type": "object",
    "$defs": {"Place": {"type": "object"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "place": {"$ref": "#/$defs/Place"},
        "names": {"type": "array"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "kind": {"enum": ["1", "2"]},
        "loop": {"$ref": "#/$defs/Loop"},
        "free": {},
    },
}


@pytest.mark.parametrize(
    ("parameter", "text", "spelled"),
    [
        ("text", "5", '"5"'),
        ("text", " a\n", '" a\\n"'),
        ("count", " 5 ", "5"),
        ("count", "5.0", "5"),
        ("count", "5.5", '"5.5"'),
        ("count", "five", '"five"'),
        ("count", "null", '"null"'),
        ("share", "1.50", "1.50"),
        ("share", "3", "3"),
        ("share", "1e999", '"1e999"'),
        ("share", "NaN", '"NaN"'),
        ("flag", "True", "true"),
        ("flag", "1", '"1"'),
        ("place", '{"a": 1}', '{"a": 1}'),
        ("place", "{'a': None}", '{"a": null}'),
        ("place", "[1]", '"[1]"'),
        ("names", "[" * 5000, json.dumps("[" * 5000)),
        ("maybe", "None", "null"),
        ("maybe", "7", "7"),
        ("either", "7", "7"),
        ("either", "seven", '"seven"'),
        ("kind", "1", '"1"'),
        ("loop", "1", "1"),
        ("free", "1", "1"),
        ("free", "x", '"x"'),
        ("unknown", "1", '"1"'),
        ("text", "\ud800", '"\\ud800"'),
    ],
)
def test_values_by_their_schema(parameter: str, text: str, spelled: str) -> None:
    function = {"name": "f", "parameters": SCHEMA}
    for tool in ({"type": "function", "function": function}, {"type": "function", **function}):
        assert SchemaValues([tool]).spell("f", parameter, text) == spelled


def test_schemas_that_are_none_make_strings() -> None:
    tools: list[Any] = [{}, {"function": 3}, {"function": {"name": "f", "parameters": [1]}}]
    assert SchemaValues(tools).spell("f", "a", "1") == '"1"'


class TestSource:
    def run(self, steps: Steps[Any], source: TextScanner, pieces: list[str]) -> Any:
        """What steps return when the pieces come one by one, and then the end."""
        try:
            next(steps)
            for piece in pieces:
                source.add(piece)
                next(steps)
            source.end()
            next(steps)
        except StopIteration as stop:
            return stop.value
        raise AssertionError("steps wait behind the end")

    def test_the_leftmost_mark_is_found_however_it_is_cut(self) -> None:
        text, marks = "aab<x<xyz>b", ("<xyz>", "<xq", "b<xb")
        for at in range(len(text)):
            source = TextScanner()
            said: list[str] = []
            found = self.run(source.until(marks, said.append), source, [text[:at], text[at:]])
            assert (found, "".join(said)) == ("<xyz>", "aab<x")

    def test_an_end_inside_a_mark_is_text(self) -> None:
        source = TextScanner()
        said: list[str] = []
        assert self.run(source.until(("<xyz>",), said.append), source, ["a<x", "y"]) == ""
        assert "".join(said) == "a<xy"

    def test_a_mark_too_far_away_is_none(self) -> None:
        for pieces in (["abcdef>"], list("abcdef>")):
            source = TextScanner()
            source.held = []
            with pytest.raises(ParseError):
                self.run(source.before((">",), limit=3), source, pieces)
            assert "".join(source.held) == "abc"


@pytest.mark.req("SEC-15")
def test_parsers_evaluate_nothing_and_search_by_no_expression() -> None:
    """No eval, exec, compile or literal_eval, and no regular expressions, in any parser."""
    modules = ["headrace_server.parsing.text_scanner"]
    for package in (headrace_server.tool_parsers, headrace_server.reasoning_parsers):
        found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        modules += [module.name for module in found]
    assert len(modules) > 40
    for name in modules:
        path = importlib.import_module(name).__file__
        assert path is not None
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            assert not set(_names(node)) & BANNED, f"{name}:{getattr(node, 'lineno', 0)}"


BANNED = {"eval", "exec", "literal_eval", "compile", "re", "ast", "pickle"}


def _names(node: ast.AST) -> list[str]:
    """The names that one node of a module uses or imports."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module):
            return [str(module)]
    return []


@pytest.mark.req("SEC-15")
@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (HermesToolParser, "<tool_call>"),
        (HermesToolParser, '<tool_call>{"name":"a","arguments":{"a":"'),
        (HermesToolParser, '<tool_call>{"name": "'),
        (PythonicToolParser, "[f(a='\\'"),
    ],
)
def test_time_for_a_megabyte_is_linear(parser: Any, text: str) -> None:
    def read(whole: str) -> None:
        made = parser()
        for at in range(0, len(whole), 64):
            made.feed(whole[at : at + 64])
        made.finish()

    # 21 repetitions make the larger of the two texts a megabyte.
    assert_linear(read, lambda size: text + text * (21 * size // len(text)))
