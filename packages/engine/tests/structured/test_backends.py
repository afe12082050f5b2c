"""The conformance suite on every backend whose library is installed."""

import json
import random

import pytest

from headrace_core.errors import RequestError
from headrace_core.grammar import GrammarSpec
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.backends.lm_format_enforcer import EnforcerBackend
from headrace_engine.structured.backends.outlines import OutlinesBackend
from headrace_engine.structured.backends.xgrammar import XGrammarBackend
from headrace_testing.engine.grammars import (
    SCHEMA,
    GrammarConformance,
    allowed,
    walk,
    word_vocabulary,
)


class TestGuidance(GrammarConformance):
    backend = GuidanceBackend


class TestXGrammar(GrammarConformance):
    backend = XGrammarBackend

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip(
            "xgrammar", reason="pip install 'headrace-engine[xgrammar]'", exc_type=ImportError
        )


class TestOutlines(GrammarConformance):
    backend = OutlinesBackend
    kinds = frozenset({"json", "json_object", "regex", "choice"})
    goes_on = False

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("outlines_core", reason="pip install 'headrace-engine[outlines]'")


class TestEnforcer(GrammarConformance):
    backend = EnforcerBackend
    kinds = frozenset({"json", "regex", "choice"})
    whole_characters = True

    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip(
            "lmformatenforcer", reason="pip install 'headrace-engine[lm-format-enforcer]'"
        )


def test_the_others_say_what_they_have_not():
    def refusal(backend, kind, **options):
        return backend.refuse(GrammarSpec(backend.name, kind, "{}", **options))

    assert refusal(OutlinesBackend, "grammar")
    assert refusal(EnforcerBackend, "structural_tag")
    assert refusal(XGrammarBackend, "json", whitespace_pattern="[ ]?")
    assert refusal(OutlinesBackend, "json", any_whitespace=False)


@pytest.mark.parametrize("kind", ["regex", "json"])
def test_tokens_of_the_enforcer_are_those_that_its_library_finds(kind):
    library = pytest.importorskip("lmformatenforcer")
    backend = EnforcerBackend(word_vocabulary())
    source = {"regex": r"(a|é|ab+c)* [^\sx]{1,3}(true|12)?", "json": json.dumps(SCHEMA)}[kind]
    grammar = backend.compile(GrammarSpec(backend.name, kind, source))
    texts = {i: text for i, text in backend.texts.items() if kind == "regex" or min(text) >= " "}
    size = backend.vocabulary.size
    data = library.TokenEnforcerTokenizerData(
        [(i, text, True) for i, text in texts.items()],
        lambda ids: "".join(texts[i] for i in ids), size, False, size + 1,
    )  # fmt: skip
    for seed in range(6):
        make = library.RegexParser if kind == "regex" else library.JsonSchemaParser
        theirs = library.TokenEnforcer(data, make(source if kind == "regex" else SCHEMA))
        matcher, taken, chosen = grammar.matcher(), [], random.Random(seed)
        for _ in range(40):
            found = theirs.get_allowed_tokens(taken).allowed_tokens
            ours = allowed(matcher, backend.vocabulary)
            assert sorted(set(found) - {size}) == ours, taken
            assert matcher.complete == (size in found)
            if not ours:
                break
            taken.append(chosen.choice(ours))
            assert matcher.advance(taken[-1:])


def enforcer_schema():
    """A backend, and a function that compiles the schema with it."""
    pytest.importorskip("lmformatenforcer")
    backend = EnforcerBackend(word_vocabulary())
    spec = GrammarSpec(backend.name, "json", json.dumps(SCHEMA))
    return backend, lambda: backend.compile(spec)


def test_the_enforcer_finds_the_first_tokens_while_it_compiles(monkeypatch):
    backend, compiled = enforcer_schema()
    found, mask_of = [], backend.mask_of
    monkeypatch.setattr(backend, "mask_of", lambda parser: found.append(1) or mask_of(parser))
    grammar = compiled()
    assert len(found) == 1
    for _ in range(2):
        assert allowed(grammar.matcher(), backend.vocabulary)
    assert len(found) == 1, "each request looks for them again"


def test_a_failure_of_the_enforcer_s_parser_ends_one_request(monkeypatch):
    backend, compiled = enforcer_schema()

    def fail(*arguments):
        raise Exception("a slip of the library")

    grammar = compiled()
    neighbour, searching, reading = (grammar.matcher() for _ in range(3))
    first = allowed(neighbour, backend.vocabulary)[:1]
    assert searching.advance(first)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "mask_of", fail)
        assert allowed(searching, backend.vocabulary) == []
        with pytest.raises(RequestError, match="cannot be compiled"):
            compiled()
    with monkeypatch.context() as patch:
        patch.setattr(type(reading._parsers[0]), "add_character", fail)
        assert not reading.advance(first)
    assert "failed" in searching.failure
    assert "failed" in reading.failure
    assert neighbour.advance(first)
    assert not neighbour.failure


def test_the_enforcer_s_parser_is_not_blamed_for_want_of_memory(monkeypatch):
    backend, compiled = enforcer_schema()
    matcher = compiled().matcher()
    assert matcher.advance(allowed(matcher, backend.vocabulary)[:1])

    def fail(parser):
        raise MemoryError

    monkeypatch.setattr(backend, "mask_of", fail)
    with pytest.raises(MemoryError):
        allowed(matcher, backend.vocabulary)
    assert not matcher.failure


@pytest.mark.parametrize(
    "backend", [GuidanceBackend, XGrammarBackend, OutlinesBackend, EnforcerBackend]
)
def test_thousands_of_choices(backend):
    pytest.importorskip(backend.library)
    texts = [f"text {i * 7919 % 100003}" for i in range(10_000)] + ["t", "te" * 100_000]
    vocabulary = word_vocabulary()
    grammar = backend(vocabulary).compile(GrammarSpec(backend.name, "choice", json.dumps(texts)))
    known = {text.encode() for text in texts}
    for seed in range(20):
        text = walk(grammar, vocabulary, seed, structural=0)
        assert text is None or text in known
    matcher = grammar.matcher()
    assert matcher.advance(list(b"t"))
    assert matcher.complete
    assert set(allowed(matcher, vocabulary)) == {ord("e")}
    assert not matcher.terminated
    assert matcher.advance(list(b"ext 7919"))
    assert (matcher.complete, matcher.terminated) == (True, False)
    matcher.roll_back(8)
    assert matcher.advance(list(b"etetet"))
    assert not matcher.complete
    assert not matcher.advance(list(b"x"))
