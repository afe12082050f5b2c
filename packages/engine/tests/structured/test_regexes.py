"""A regex means the same whichever backend serves it: each accepts the same texts, or refuses the regex."""

from __future__ import annotations

import functools
import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarBackend, GrammarSpec, Vocabulary, refuse
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.backends.lm_format_enforcer import EnforcerBackend
from headrace_engine.structured.backends.outlines import OutlinesBackend
from headrace_engine.structured.backends.xgrammar import XGrammarBackend
from headrace_engine.structured.grammars.regex import NotRead, as_regex, read_regex

OTHERS = (XGrammarBackend, OutlinesBackend, EnforcerBackend)
CHARACTERS = "éß٣日😀K\u2028\u00a0\u0085"
NAMED = sorted({*CHARACTERS, *map(chr, range(ord("à"), ord("ü") + 1))})
TOKENS = [*(bytes([byte]) for byte in range(256)), *(c.encode() for c in NAMED)]
ID_OF = {token: token_id for token_id, token in enumerate(TOKENS)}
TEXTS = [
    "", "a", "b", "ab", "aa", "aab", "aaab", "abb", "abab", "ba", "a^b", "a$b", "^a$", "aZ", "abZ", "A", "1",
    "12", "_", "-", "&", "~", "\n", "\r", "\t", "\v", "\x00", "\x1c", "\x7f", " ", "[", "]", "a]", "l]",
    "\\", "/", "a/b", "{", "a{,2}", "d83d", "ud83d", "h", "#", "a b", "a\nb", *CHARACTERS, "Aab",
]  # fmt: skip
ALIKE = [
    "", "ab", "a|b", "a|", "(a|b)*b", "(?:ab)+", "a{2}", "a{1,}", "a{1,2}b", "a{0}", "a*?b", "a??b", "()",
    "^ab$", "^a|b$", "[ab]", "[^ab]", "[a-c]", "[a-]", "[-a]", r"[\]\[\^\-\\]", r"[\n\t]", ".", "a.b", "a/b",
    r"\s", r"\S", r"[\sa]", r"[^\s]", r"\n", r"\x41", r"\u0041", r"\u{e9}", r"[\x00-\x1f]", r"\/", r"\-",
    r"\.|\^|\$|\*|\+|\?|\(|\)|\[|\]|\{|\}|\\", "é|日|😀", "[à-ü]", "[^à-ü]", "]", "}", "#", "a b", "a\nb",
    "[.]", r"\x{1F600}", r"\U0001F600", "K", "[A-Z]", "(a(b(a)?)?)?b",
]  # fmt: skip
REFUSED = [
    "a^b", "a$b", r"ab\Z", "$^", r"\ba", "(?=a)ab", "(?!b)a", "(?<=a)b", r"(a)\1", "a{,2}", "a{", "{", "[[]",
    r"\ud83d", r"[\ud83d]", r"\101", r"\0", r"\cA", r"\e", r"\h", r"\R", r"\é", "(?#c)a", "(?>a|ab)b",
    r"\Qa\E", r"[\b]", r"\N", r"[a-\d]", r"[\w-a]", "[z-a]", "*a", "(a", "a)", "a{2,1}", "(?a)a",
]  # fmt: skip
"""Regexes that guidance does not take."""
ONLY_RUST = [
    r"\d", r"\w", r"\D", r"\W", r"[\d]", r"[^\w]", "[[:alpha:]]", "[[:alpha:]]+b", "[a&&b]|c", "[a~~b]",
    "[a--b]", "[]a]", "[a[b]]", r"\p{L}", r"[\p{L}]", "(?i)k", "(?s).", "(?P<n>a)b", "a*+", "(^a|b)",
    "(?x)a b",     r"\Aab", r"ab\z",
]  # fmt: skip
"""Regexes of Rust's dialect that the others read otherwise, or not at all."""


@functools.cache
def made(backend: type[GrammarBackend]) -> GrammarBackend:
    return backend(Vocabulary(TOKENS))


def accepted(backend: type[GrammarBackend], pattern: str, texts: list[str]) -> set[str] | None:
    """The texts that match; None: the backend leaves the regex to others.

    Raises:
        RequestError: it is malformed.
    """
    spec = GrammarSpec(backend.name, "regex", pattern)
    if backend.refuse(spec):
        return None
    try:
        grammar = made(backend).compile(spec)
    except UnsupportedFeature:
        return None
    found = set()
    for text in texts:
        whole = backend is EnforcerBackend  # it knows whole characters only
        tokens = [ID_OF[c.encode()] for c in text] if whole else list(text.encode())
        matcher = grammar.matcher()
        if matcher.advance(tokens) and matcher.complete:
            found.add(text)
    return found


def others() -> list[type[GrammarBackend]]:
    return [backend for backend in OTHERS if importlib.util.find_spec(backend.library)]


@pytest.mark.parametrize("pattern", ALIKE)
def test_all_backends_accept_the_same_texts(pattern):
    expected = accepted(GuidanceBackend, pattern, TEXTS)
    for backend in others():
        found = accepted(backend, pattern, TEXTS)
        assert found is not None, f"{backend.name} refuses it"
        if backend is OutlinesBackend:
            # It leaves out what goes on behind a text that matches.
            assert found <= expected
        else:
            assert found == expected, backend.name


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_guidance_refuses_is_served_by_nobody(pattern):
    with pytest.raises(RequestError):
        accepted(GuidanceBackend, pattern, TEXTS)
    for backend in others():
        assert accepted(backend, pattern, TEXTS) is None, backend.name


@pytest.mark.parametrize("pattern", ONLY_RUST)
def test_what_the_others_would_read_otherwise_they_refuse(pattern):
    expected = accepted(GuidanceBackend, pattern, TEXTS)
    for backend in others():
        found = accepted(backend, pattern, TEXTS)
        if backend is OutlinesBackend:
            assert found is None or found <= expected
        else:
            assert found is None, backend.name


@st.composite
def patterns(draw) -> str:
    leaves = st.sampled_from(
        [
            "a",
            "b",
            "é",
            "[ab]",
            "[^a]",
            ".",
            r"\s",
            "(?:a|b)",
            r"\n",
            "[a-cé]",
            r"\.",
            "日",
            "^",
            "$",
            r"\d",
            "[",
        ]
    )
    parts = draw(st.lists(leaves, max_size=4))
    marks = [
        draw(st.sampled_from(["", "", "", "*", "+", "?", "{2}", "{0,2}", "|", "*?"])) for _ in parts
    ]
    return "".join(part + mark for part, mark in zip(parts, marks))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(patterns(), st.lists(st.text("ab\né日. ", max_size=5), max_size=6))
def test_random_regexes(pattern, texts):
    try:
        expected = accepted(GuidanceBackend, pattern, texts)
    except RequestError:
        expected = None
    for backend in others():
        found = accepted(backend, pattern, texts)
        if found is not None and backend is OutlinesBackend:
            assert expected is not None
            assert found <= expected
        elif found is not None:
            assert found == expected, (backend.name, pattern)


def test_digits_and_letters_of_unicode_and_ascii():
    r"""Guidance and outlines: ``\d`` and ``\w`` are those of all scripts, as the page says."""
    for backend in (GuidanceBackend, OutlinesBackend):
        if importlib.util.find_spec(backend.library):
            assert accepted(backend, r"\d", TEXTS) == {"1", "٣"}
            assert {"é", "日", "٣", "_"} <= accepted(backend, r"\w", TEXTS)
            assert accepted(backend, "[0-9]", TEXTS) == {"1"}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a^b", "character 2: '^' must begin or end the whole regex"),
        (r"x\d", r"character 2: \d is any decimal digit of Unicode; write [0-9]"),
        ("[[:alpha:]]", "character 2: '[' must be escaped in a class"),
        ("(?=a)ab", "character 1: must be a group ( ) or (?: )"),
        (r"\ud83d", r"character 1: \ud83d is not a character"),
        ("(" * 200 + ")" * 200, "groups in each other: must be at most 100"),
        ("a**", "a repetition must not be repeated without a group"),
        ("\\", "the escape"),
        ("[a", "this class is not closed"),
    ],
)
def test_a_refusal_says_where(pattern, said):
    with pytest.raises(NotRead) as caught:
        read_regex(pattern)
    assert said in str(caught.value)
    spec = GrammarSpec("xgrammar", "regex", pattern)
    assert said in str(refuse(spec, XGrammarBackend.refuse(spec)))


def test_a_tree_is_written_as_one_regex():
    assert as_regex(read_regex("^a(b|[^c])?$")) == "a(?:b|[^c]){0,1}"
    assert as_regex(read_regex(".")) == r"[^\x0a]"
    assert as_regex(read_regex(r"[\s\S]")) == r"(?:.|\n)"


BYTES = [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("kind", "source", "named"),
    [
        ("regex", "é", "'é'"),
        ("regex", "caf[eé]", "'é'"),
        ("regex", r"a|(?:b\u{e9})?", "'é'"),
        ("regex", "[é-ü日]{1,3}", "'é'"),
        ("regex", "[a-zß]", "'ß'"),
        ("regex", r"[\sé]", "'é'"),
        ("regex", r"[^\x00-\x7f]", "none of a class that holds nearly all but ASCII"),
        ("json", '{"enum": ["a", "é"]}', "'enum' at '#'"),
        ("json", '{"type": "array", "items": {"enum": ["日"]}}', "'enum' at '#/items'"),
        (
            "json",
            '{"type": "object", "properties": {"é": {"type": "string"}}, "required": ["é"]}',
            "'properties' at '#'",
        ),
    ],
)
def test_the_enforcer_refuses_characters_that_are_not_a_token(kind, source, named):
    pytest.importorskip(EnforcerBackend.library)
    spec = GrammarSpec(EnforcerBackend.name, kind, source)
    assert not EnforcerBackend.refuse(spec)
    with pytest.raises(UnsupportedFeature) as caught:
        EnforcerBackend(Vocabulary(BYTES)).compile(spec)
    assert "it writes whole characters only" in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("regex", "[^a]"),
        ("regex", ".+"),
        ("regex", r"a\sb\S"),
        ("regex", r"\x07[ab]"),
        ("json", '{"type": "string"}'),
        ("json", '{"enum": ["a"]}'),
        ("choice", '["é"]'),
    ],
)
def test_the_enforcer_serves_what_ascii_can_begin(kind, source):
    pytest.importorskip(EnforcerBackend.library)
    backend = EnforcerBackend(Vocabulary(BYTES))
    words = np.zeros((1, backend.vocabulary.num_words), np.int32)
    backend.compile(GrammarSpec(EnforcerBackend.name, kind, source)).matcher().fill_bitmask(
        words, 0
    )
    assert words.any()


def test_a_null_character_has_its_escape():
    with pytest.raises(NotRead, match=r"write \\x00"):
        read_regex(r"a\0")
    with pytest.raises(RequestError, match=r"\\x00"):
        accepted(GuidanceBackend, r"a\0", [])
