"""Numbers beyond what backends' libraries hold exactly: honoured or refused, never written wrong."""

from __future__ import annotations

import decimal
import itertools
import json
import random
from fractions import Fraction

import pytest

from headrace_core.errors import RequestError
from headrace_core.grammar import Vocabulary
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.backends.guidance import GuidanceBackend
from headrace_engine.structured.backends.lm_format_enforcer import EnforcerBackend
from headrace_engine.structured.backends.outlines import OutlinesBackend
from headrace_engine.structured.backends.xgrammar import XGrammarBackend
from headrace_engine.structured.source import source_of
from headrace_testing.engine.grammars import allowed

BACKENDS = (GuidanceBackend, XGrammarBackend, OutlinesBackend, EnforcerBackend)
BYTES = Vocabulary([bytes([byte]) for byte in range(256)])
EDGES = [2**53, 2**60, 10**18 - 1, 10**18, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
VALUES = sorted({sign * (edge + off) for edge in EDGES for off in range(-3, 4) for sign in (1, -1)})


@pytest.fixture(scope="module")
def guidance():
    return GuidanceBackend(BYTES)


def spec_of(schema, backend=GuidanceBackend, kind="json"):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    params = StructuredOutputsParams(**{kind: text}, disable_fallback=True)
    spec = source_of(params, StructuredOutputsConfig()).spec(backend.name)
    return spec, backend.refuse(spec)


def takes(backend, spec, text):
    matcher = backend.compile(spec).matcher()
    return matcher.advance(list(text.encode())) and matcher.complete


def is_valid(schema, value):
    return (
        ("minimum" not in schema or Fraction(schema["minimum"]) <= value)
        and ("maximum" not in schema or value <= Fraction(schema["maximum"]))
        and ("exclusiveMinimum" not in schema or Fraction(schema["exclusiveMinimum"]) < value)
        and ("exclusiveMaximum" not in schema or value < Fraction(schema["exclusiveMaximum"]))
    )


def bounds():
    for edge, off, sign in itertools.product(EDGES, (-1, 0, 1), (1, -1)):
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            yield {keyword: sign * (edge + off)}
            yield {keyword: float(sign * (edge + off))}
    yield {"minimum": -(10**30), "exclusiveMaximum": -5}
    yield {"minimum": 5, "maximum": 1e30}
    yield {"minimum": 9.3e18, "maximum": 1e30}
    yield {"exclusiveMinimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 9}


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_no_bound_lets_a_value_outside_through(guidance, kind):
    served = 0
    for bound in bounds():
        schema = {"type": kind, **bound}
        spec, refusals = spec_of(schema)
        if refusals:
            (keyword,) = (k for k in bound if f"'{k}' at '#': " in refusals[0])
            assert "must be at" in refusals[0], keyword
            continue
        served += 1
        try:
            prototype = guidance.compile(spec)
        except RequestError:
            assert len(bound) == 2, "nothing that the library holds is between the two"
            continue
        for value in [*VALUES, 0, 6, -6]:
            matcher = prototype.matcher()
            if matcher.advance(list(str(value).encode())) and matcher.complete:
                assert is_valid(bound, value), (schema, value)
    assert served > 90


@pytest.mark.parametrize(
    ("bound", "inside"),
    [
        ({"maximum": 2**63 - 1}, [2**63 - 1, -(10**25), 0]),
        ({"maximum": 1e30}, [2**63 - 1, 7]),
        ({"exclusiveMaximum": 2**53 + 2}, [2**53]),
        ({"minimum": -(2**63)}, [-(2**63) + 1024, 10**25]),
        ({"minimum": 2**53 + 2}, [2**53 + 2, 10**25]),
    ],
)
def test_wide_bounds_leave_their_integers(guidance, bound, inside):
    spec, refusals = spec_of({"type": "integer", **bound})
    assert not refusals
    for value in inside:
        assert takes(guidance, spec, str(value)), (bound, value)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "multipleOf"])
def test_a_bound_out_of_reach_is_refused_by_name(backend, keyword):
    schema = {"type": "object", "properties": {"a": {"type": "integer", keyword: 10**30}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    spec, refusals = spec_of(schema, backend)
    if refusals:
        assert any(f"'{keyword}' at '#/properties/a'" in refusal for refusal in refusals)
        return
    with pytest.raises(RequestError, match=f"'{keyword}' at '#/properties/a'"):
        backend(BYTES).compile(spec)


@pytest.mark.parametrize(
    ("keyword", "value", "accepted"),
    [
        ("minLength", "1e400", "whole number"),
        ("minItems", "18446744073709551617", "at most 2147483647"),
        ("minProperties", "1e30", "at most 2147483647"),
        ("maximum", "1e400", "a number in"),
        ("exclusiveMinimum", "true", "a number in"),
        ("multipleOf", "-1e30", "above 0"),
        ("multipleOf", "0", "above 0"),
        ("const", "1e400", "of numbers in"),
        ("enum", "[1, [-1e400]]", "of numbers in"),
    ],
)
def test_what_no_output_satisfies_is_malformed(keyword, value, accepted):
    with pytest.raises(RequestError, match=f"'{keyword}' at '#/items'.*{accepted}"):
        spec_of(f'{{"items": {{"{keyword}": {value}}}}}')


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_counts_are_whole_numbers_and_too_many_is_no_limit(backend):
    schema = {"type": "array", "items": {"type": "null"}, "minItems": 2.0, "maxItems": 1e30}
    spec, refusals = spec_of(schema, backend)
    if refusals:
        assert not any("maxItems" in refusal for refusal in refusals)
        return
    made = backend(BYTES)
    assert takes(
        made, spec, "[null,null,null]" if backend is GuidanceBackend else "[null, null, null]"
    )
    assert not takes(made, spec, "[null]")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("value", [2**53 + 1, 2**63 - 1, 2**64 + 1, -(10**29) - 7, [1, 2**53 + 1]])
def test_constants_are_written_exactly_or_refused(backend, value):
    for schema in ({"const": value}, {"enum": [value, "x"]}):
        spec, refusals = spec_of(schema, backend)
        text = json.dumps(value, separators=(",", ":"))
        assert refusals or takes(backend(BYTES), spec, text), (schema, refusals)


FLOATS = [0.1, 1e-7, 1.5, 1e22, 21119.906027865378, -0.0048130000000000004, 1e300, 5e-324, 1e-300]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("value", FLOATS)
def test_constants_of_many_digits_are_read_as_they_were(backend, value):
    spec, refusals = spec_of({"const": value}, backend)
    if refusals:
        assert "'const' at '#'" in refusals[0]
        return
    matcher, text = backend(BYTES).compile(spec).matcher(), b""
    while not matcher.complete:
        (byte, *_) = allowed(matcher, BYTES)
        assert matcher.advance([byte])
        text += bytes([byte])
    assert json.loads(text) == value


def test_bounds_with_many_digits_let_nothing_outside_through(guidance):
    chosen = random.Random(4)
    for _ in range(150):
        bound = chosen.uniform(-1, 1) * 10.0 ** chosen.randrange(-30, 17)
        keyword = chosen.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
        spec, refusals = spec_of({"type": "number", keyword: bound})
        assert not refusals
        prototype = guidance.compile(spec)
        for places in (14, 16, 17, 18, 20, 30, 40):
            for text in near(bound, places):
                matcher = prototype.matcher()
                if matcher.advance(list(text.encode())) and matcher.complete:
                    assert is_valid({keyword: repr(bound)}, Fraction(text)), (keyword, bound, text)


def near(bound, places):
    """Decimal numbers of so many digits on both sides of a bound."""
    with decimal.localcontext(prec=places):
        at = +decimal.Decimal(repr(bound))
        yield from (f"{one:f}" for one in (at, at.next_plus(), at.next_minus()))


def test_schemas_in_structural_tags_are_read_the_same(guidance):
    inner = {"type": "array", "items": {"type": "integer", "maximum": 1e30}, "maxItems": 2.0}
    tag = {"format": {"type": "tag", "begin": "<", "end": ">",
                      "content": {"type": "json_schema", "json_schema": inner}}}  # fmt: skip
    spec, refusals = spec_of(tag, kind="structural_tag")
    assert not refusals
    assert takes(guidance, spec, "<[9223372036854775807]>")
    assert not takes(guidance, spec, f"<[{10**31}]>")
    assert not takes(guidance, spec, "<[1,2,3]>")
    inner["items"]["minimum"] = 2e30
    (refusal,) = spec_of(tag, kind="structural_tag")[1]
    assert refusal.startswith("'minimum' at '#")
    inner["minItems"] = 1e30
    with pytest.raises(RequestError, match="'minItems' at '#"):
        spec_of(tag, kind="structural_tag")
