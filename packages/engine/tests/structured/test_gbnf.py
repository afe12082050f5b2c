"""Grammars in GBNF: a compiled grammar accepts the texts of its language, and no others."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec, Vocabulary
from headrace_engine.structured.backends import guidance as guidance_module
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.backends.library import LibraryBackend
from headrace_engine.structured.backends.xgrammar import XGrammarBackend
from headrace_engine.structured.grammars import lark_writer, lexemes
from headrace_engine.structured.grammars.gbnf import read

HAS_XGRAMMAR = importlib.util.find_spec("xgrammar") is not None

ALPHABET = 'aab-]^\\"\n\té😀\x01'


@functools.cache
def guidance() -> GuidanceBackend:
    return GuidanceBackend(Vocabulary([bytes([byte]) for byte in range(256)]))


@functools.cache
def xgrammar() -> XGrammarBackend:
    return XGrammarBackend(Vocabulary([bytes([byte]) for byte in range(256)]))


def accepts(source: str, *texts: str, backend: LibraryBackend | None = None) -> list[bool]:
    """Whether the compiled grammar takes each text as a whole."""
    backend = backend or guidance()
    grammar = backend.compile(GrammarSpec(backend.name, "grammar", source))
    found = []
    for text in texts:
        matcher = grammar.matcher()
        taken = all(matcher.advance([byte]) for byte in text.encode())
        assert not matcher.failure
        found.append(taken and matcher.complete)
    return found


# ------------------------------------------------- grammars at random, with a matcher of their own


@dataclass
class Part:
    """A part of a grammar as a small tree: its kind, what it holds, and how it is written."""

    kind: str
    parts: list[Part] = field(default_factory=list)
    text: str = ""
    least: int = 1
    most: int | None = 1
    written: str = ""


def ends(part: Part, rules: dict[str, Part], text: str, at: int, known: dict) -> frozenset[int]:
    """Where in the text the part may end that begins at a place."""
    key = (id(part), at)
    if key not in known:
        known[key] = frozenset(_ends(part, rules, text, at, known))
    return known[key]


def _ends(part: Part, rules: dict[str, Part], text: str, at: int, known: dict) -> set[int]:
    if part.kind == "text":
        return {at + len(part.text)} if text.startswith(part.text, at) else set()
    if part.kind == "class":
        inside = at < len(text) and (text[at] in part.text) == (part.least == 1)
        return {at + 1} if inside else set()
    if part.kind == "rule":
        return set(ends(rules[part.text], rules, text, at, known))
    if part.kind == "either":
        return {end for one in part.parts for end in ends(one, rules, text, at, known)}
    if part.kind == "all":
        places = {at}
        for one in part.parts:
            places = {end for place in places for end in ends(one, rules, text, place, known)}
        return places
    found, places, seen = set(), {at}, set()
    for count in range(200 if part.most is None else part.most + 1):
        if count >= part.least:
            found |= places
        key = frozenset(places)
        if not places or (part.most is None and count > part.least and key in seen):
            break
        seen.add(key)
        places = {e for place in places for e in ends(part.parts[0], rules, text, place, known)}
    return found


def matches(rules: dict[str, Part], text: str) -> bool:
    return len(text) in ends(rules["root"], rules, text, 0, {})


def some_text(part: Part, rules: dict[str, Part], draw, depth: int = 0) -> str:
    """A text of the part."""
    if part.kind == "text":
        return part.text
    if part.kind == "class":
        fit = [c for c in ALPHABET + "cdz" if (c in part.text) == (part.least == 1)]
        return draw(st.sampled_from(fit))
    if part.kind == "rule":
        return some_text(rules[part.text], rules, draw, depth + 1)
    if part.kind == "either":
        last = len(part.parts) - 1
        chosen = draw(st.integers(0, last)) if depth < 6 else last  # the last one is not recursive
        return some_text(part.parts[chosen], rules, draw, depth + 1)
    if part.kind == "all":
        return "".join(some_text(one, rules, draw, depth + 1) for one in part.parts)
    most = part.least + 2 if part.most is None else part.most
    count = draw(st.integers(part.least, most)) if depth < 6 else part.least
    return "".join(some_text(part.parts[0], rules, draw, depth + 1) for _ in range(count))


ESCAPES = {"\n": "\\n", "\t": "\\t", '"': '\\"', "\\": "\\\\"}


@st.composite
def written_character(draw, character: str, special: str) -> str:
    code = ord(character)
    ways = [f"\\U{code:08x}"]
    ways += [f"\\u{code:04X}"] if code < 0x10000 else []
    ways += [f"\\x{code:02x}"] if code < 0x100 else []
    if character in ESCAPES:
        ways += [ESCAPES[character]] * 3
    elif character in special:
        ways += ["\\" + character] * 3
    elif code >= 32:
        ways += [character] * 5
    return draw(st.sampled_from(ways))


SPACES = st.sampled_from(["", " ", "  ", "\n  ", ' # a "comment" ( ::= |\n ', "\t"])


@st.composite
def leaves(draw) -> Part:
    if draw(st.booleans()):
        text = draw(st.text(ALPHABET, max_size=3))
        inner = "".join(draw(written_character(c, '"\\')) for c in text)
        return Part("text", text=text, written=f'"{inner}"')
    inside = draw(st.lists(st.sampled_from(ALPHABET + "b-d"), min_size=1, max_size=3))
    chosen, inner = "", ""
    for one in inside:
        chosen += one
        inner += draw(written_character(one, "[]^-\\"))
    if draw(st.booleans()):
        chosen, inner = chosen + "abc", inner + "a-c"
    negated = draw(st.booleans()) and draw(st.booleans())
    return Part(
        "class",
        text=chosen,
        least=0 if negated else 1,
        written=f"[{'^' if negated else ''}{inner}]",
    )


@st.composite
def composed(draw, inner) -> Part:
    kind = draw(st.sampled_from(["all", "either", "repeated", "repeated"]))
    if kind == "repeated":
        one = draw(inner)
        least, most, mark = draw(
            st.sampled_from(
                [(0, None, "*"), (1, None, "+"), (0, 1, "?"), (2, 2, "{2}"), (1, 3, "{ 1, 3 }"),
                 (2, None, "{2,}"), (0, 0, "{0}"), (0, 2, "{0,2}")]
            )
        )  # fmt: skip
        bare = one.kind in ("text", "class", "rule") or (
            draw(st.booleans()) and one.kind == "repeated"
        )
        written = one.written if bare else f"({one.written})"
        return Part("repeated", [one], least=least, most=most, written=written + mark)
    parts = draw(st.lists(inner, min_size=1, max_size=3))
    between = " " + draw(SPACES) if kind == "all" else draw(SPACES) + "|" + draw(SPACES)
    return Part(kind, parts, written="(" + between.join(one.written for one in parts) + ")")


@st.composite
def grammars(draw) -> tuple[dict[str, Part], str]:
    """Rules, and the grammar as text. A rule refers to those behind it, and to any between marks."""
    names = ["root", "next-1", "B_2", "c"][: draw(st.integers(1, 4))]
    rules: dict[str, Part] = {}
    for index, name in reversed(list(enumerate(names))):
        leaf = leaves()
        if names[index + 1 :]:
            known = st.sampled_from(names[index + 1 :])
            leaf = leaf | known.map(lambda n: Part("rule", text=n, written=n))
        body = draw(st.recursive(leaf, lambda inner: composed(inner), max_leaves=6))
        if draw(st.booleans()):
            other = draw(st.sampled_from(names))
            again = Part("rule", text=other, written=other)
            marks = [
                Part("text", text=m, written=f'"{m}"')
                for m in draw(st.sampled_from(["()", "ab", "aa"]))
            ]
            nested = Part(
                "all",
                [marks[0], again, marks[1]],
                written=f'"{marks[0].text}" {other} "{marks[1].text}"',
            )
            body = Part("either", [nested, body], written=f"{nested.written} | {body.written}")
        rules[name] = body
    lines = [f"{name} ::={draw(SPACES)} {rules[name].written}{draw(SPACES)}\n" for name in names]
    return rules, draw(SPACES).lstrip(" \t") + "".join(lines)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_the_language_of_a_grammar(data):
    rules, source = data.draw(grammars())
    text = some_text(rules["root"], rules, data.draw)[:60]
    texts = [text, data.draw(st.text(ALPHABET + "()", max_size=5))]
    for _ in range(3):
        at = data.draw(st.integers(0, len(text)))
        other = data.draw(st.sampled_from([*ALPHABET, "(", ")", ""]))
        texts.append(text[:at] + other + text[at + data.draw(st.integers(0, 1)) :])
    expected = [matches(rules, text) for text in texts]
    assert accepts(source, *texts) == expected, (source, texts)
    if HAS_XGRAMMAR:
        assert accepts(source, *texts, backend=xgrammar()) == expected, (source, texts)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_nothing_else_is_accepted_where_nothing_is_cut(data):
    rules, source = data.draw(grammars())
    text = some_text(rules["root"], rules, data.draw)[:40]
    texts = [text, text + "a", text[1:], text[:-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lexemes, "MAX_WORK", -1)
        for one, taken in zip(texts, accepts(source, *texts)):
            assert matches(rules, one) or not taken


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= ([0-9]+)? "x"', ["12x", "x"], ["12", "xx", ""]),
        ('root ::= ("a"{3}){2}', ["a" * 6], ["a" * 3, "a" * 5, "a" * 7]),
        ('root ::= ("a"*){2} "b"', ["b", "aab"], ["a"]),
        (r'root ::= "\u00e9\x41\U0001F600" [\u0430-\u044f]+', ["éA😀мир"], ["éA😀", "eA😀м"]),
        ('root ::= "ab" "c" | "a" "bd"', ["abc", "abd"], ["ab", "abcd"]),
        ('root ::= word "b"\nword ::= [a-z]*', ["aab", "b", "bb"], ["aa"]),
        ('root ::= "(" root ")" | word "b"\nword ::= [a-z]*', ["((aabb))"], ["(aa)", "((b)"]),
        ('root ::= .{2}', ["\né"], ["a", "abc"]),
        ('start ::= "a"\nroot ::= start{2}', ["aa"], ["a"]),
        ('root ::=\n  "a"  # first\n  | "b"\n    "c"\n', ["a", "bc"], ["ac", "b"]),
        (r'root ::= [\]\-\\^/]+ "/"', [r"]-\^//"], ["a/"]),
        ('root ::= list\nlist ::= list "," item | item\nitem ::= [0-9]+', ["1,22,3"], ["1,", ",1"]),
        ('root ::= words\nwords ::= word | word words\nword ::= [a-z]+ " "?', ["a", "ab c"], [" a", ""]),
        ('root ::= "x" ("," root)?', ["x", "x,x,x"], ["x,", ",x"]),
        ('root ::= (root "," | "") [ab]', ["a", "a,b,b"], ["a,", "ab"]),
        ('root ::= ("a" root)?', ["", "aa"], ["b"]),
        ('root ::= "a" root | root "b" | "c"', ["acb", "aac", "cb"], ["ab", "ca"]),
    ],
)  # fmt: skip
def test_some_grammars(source, good, bad):
    expected = [True] * len(good) + [False] * len(bad)
    assert accepts(source, *good, *bad) == expected
    if HAS_XGRAMMAR:
        assert accepts(source, *good, *bad, backend=xgrammar()) == expected


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ('root ::= "a"\n\nfoo = "b"', "line 3 column 5: found '='"),
        ('foo = "b"', "line 1 column 5: expected '::=' behind the rule's name 'foo', found '='"),
        ('root ::= "a"\nb ::= c "x"\n', "line 2 column 7: there is no rule 'c'"),
        ('root ::= (\n"a"\nb ::= "x"\n', "line 1 column 10: this group is not closed"),
        ('# x\nroot ::= "a" )', "line 2 column 14: ')' closes no group"),
        ('root ::= "a', "line 1 column 10: this text is not closed"),
        ("root ::= [a", "line 1 column 10: this class is not closed"),
        ("root ::= []", "line 1 column 10: a class must hold at least one character"),
        ("root ::= [b-a]", "line 1 column 11: 'b-a': a range must not end before it begins"),
        (r'root ::= "\d"', r"line 1 column 11: unknown escape '\\d'"),
        (r'root ::= "\u12"', r"line 1 column 11: \u needs 4 hexadecimal digits"),
        (r'root ::= "\uD800"', r"line 1 column 11: \uD800 is not a character"),
        ('root ::= "a"{2,1}', "line 1 column 13: {2,1}: the second number"),
        ('root ::= "a"{x}', "line 1 column 13: must be {m}, {m,} or {m,n}"),
        ('root ::= "a"\nroot ::= "b"', "line 2 column 1: the rule 'root' is there already, in line 1"),
        ('root ::= "a" b ::= "c"', "line 1 column 14: a rule must begin on a line of its own"),
        ('b ::= "c"', "there is no rule 'root'"),
        ('root ::= <think> "a"', "line 1 column 10: found '<'"),
        ('root ::= "a" root', "line 1: the rule 'root' never ends"),
        ('root ::= "b" | a\na ::= "a" c\nc ::= a a', "the rule 'a' never ends"),
        ("root ::= root", "line 1: the rule 'root' never ends"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "line 1 column 110: groups and repetitions"),
        ("root ::= " + "(" * 150 + '"a"' + ")" * 150 + "?" * 300, "groups and repetitions"),
    ],
)  # fmt: skip
def test_an_error_names_line_and_column_of_the_source(source, said):
    with pytest.raises(RequestError) as caught:
        accepts(source)
    assert said in str(caught.value)
    if HAS_XGRAMMAR:
        with pytest.raises(RequestError) as other:
            accepts(source, backend=xgrammar())
        assert str(other.value) == str(caught.value), "the words are the same"
    assert caught.value.param == "structured_outputs.grammar"


@pytest.mark.parametrize(
    ("source", "lark"),
    [
        ('root ::= "a"', False),
        ('start ::= "a"\nroot ::= start', False),
        ('# start: x\nroot ::= "a"', False),
        ('start: "a"', True),
        ('// x\nstart[lazy]: "a"', True),
        ('A: "a::="\nstart: A', True),
        ('%llguidance {}\nstart: "a"', True),
        ("what", False),
    ],
)
def test_which_syntax_it_is(source, lark):
    from headrace_engine.structured.grammars.gbnf import is_lark

    assert is_lark(source) is lark


def test_an_error_of_the_library_names_the_rules_line():
    """What only the library finds out is told with the place in the source, not in its translation."""
    source = 'root ::= "a" b\n\n# much\nb ::= "(" b ")" | "y"\n'
    lark = lark_writer.as_lark(source)
    line = next(i for i, text in enumerate(lark.text.splitlines(), 1) if text.startswith("r1_b"))
    assert guidance_module._place(source, f"at {line}(7): too much") == "line 4: "
    assert guidance_module._place('start: "a" b\n', "at 1(12): unknown") == "line 1 column 12: "
    with pytest.raises(RequestError, match=r"line 2 column 8: unknown name"):
        accepts('\nstart: "a" b\n')


@pytest.mark.parametrize(
    "source",
    [
        'root ::= words\nwords ::= word | word words\nword ::= [a-z]+ " "?',
        'root ::= item ("," root)?\nitem ::= [a-z]+',
        'root ::= root "," item | item\nitem ::= [a-z]+',
    ],
)
def test_recursion_that_is_a_loop_is_one_lexeme(source):
    """Loops of single letters would be too much for the library with many tokens."""
    assert "start: L0\n" in lark_writer.as_lark(source).text


def test_deep_grammars():
    deep = '("x" | ' * 99 + '"a" "b"?' + ")?" * 99
    assert accepts(f"root ::= {deep}", "ab", "x", "", "ax") == [True, True, True, False]
    assert accepts(f'root ::= "(" root ")" | {deep}', "((ab))", "(x)", "(xx)") == [
        True,
        True,
        False,
    ]


def test_large_grammars_are_cut_in_little_time():
    many = " | ".join(f'"word{i} " [a-z]*' for i in range(2_000))
    source = f'root ::= "(" root ")" | item "."\nitem ::= {many}'
    found = lark_writer.to_lark(read(source))
    assert found.text.count("\n") < 10


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""The grammar of JSON in the manner of llama.cpp's example: rules over several lines, empty alternatives."""


def test_a_grammar_of_json_with_every_backend():
    good = ['{"a": [1, -2.5e3, "x\\n\\u00e9é"],\n  "b": {}}', "{}", '{"":null}']
    bad = ["{", "[1]", '{"a" 1}', '{"a":01}', '{"a":"\x01"}']
    for backend in (guidance(), *([xgrammar()] if HAS_XGRAMMAR else [])):
        assert accepts(JSON, *good, *bad, backend=backend) == [True] * 3 + [False] * 5
