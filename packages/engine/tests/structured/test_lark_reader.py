"""Grammars in Lark that never end are told so, by the rule."""

import pytest

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec, Vocabulary
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.grammars.lark_reader import check_end

BACKEND = GuidanceBackend(Vocabulary([bytes([byte]) for byte in range(256)]))


def compiled(source):
    return BACKEND.compile(GrammarSpec("guidance", "grammar", source))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('start: "a" start', 1),
        ("start: start", 1),
        ("start: a\na: start", 1),
        ('// a remark\nstart: a\na: "x" a\n | "y" a', 2),
        ('start: a b\na: "x"\nb: start "y"', 1),
        ('start: "x"? (A start)+\nA: /[a-z:]/', 1),
        ('start: "a" [start]', 0),
        ('start: "a" start?', 0),
        ('start: "a" start{0,1}', 0),
        ('start: "a" start | "b"', 0),
        ('start: "a" start\n  | "b"', 0),
        ('start: "a" start |', 0),
        ('start: a | start "b" # start: start\na: "start: start" | /start:/', 0),
    ],
)
def test_a_grammar_that_never_ends_is_told_so(source, line):
    if line:
        with pytest.raises(RequestError, match=f"line {line}: the rule 'start' never ends"):
            compiled(source)
    else:
        check_end(source)


@pytest.mark.parametrize(
    "source",
    [
        'start: x\nx: %json {"type": "string"}',
        "start: missing start",
        'start[capture]: "a" start',
        'start: "a" ) start',
        'start: "a" start\nstart: "b"',
        "start: " + "(" * 60 + '"a" start' + ")" * 60,
    ],
)
def test_what_the_reader_does_not_know_is_left_to_the_library(source):
    check_end(source)
