"""``response_format`` and ``structured_outputs`` on the wire: what reaches the engine, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.errors import RequestError
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_testing.fakes.engine import FakeEngine

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, {"json_object": True}),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
            {"json": SCHEMA},
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "n", "schema": False}},
            {"json": False},
        ),
        (
            "response_format",
            {"type": "structural_tag", "format": {"type": "regex", "pattern": "a"}},
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "format": {"type": "regex", "pattern": "a"},
                }
            },
        ),
        (
            "response_format",
            {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
                "triggers": ["<a"],
            },
            {
                "structural_tag": {
                    "type": "structural_tag",
                    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
                    "triggers": ["<a"],
                }
            },
        ),
        ("structured_outputs", {"json": SCHEMA}, {"json": SCHEMA}),
        ("structured_outputs", {"json": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ("structured_outputs", {"json": True}, {"json": True}),
        ("structured_outputs", {"regex": "a+"}, {"regex": "a+"}),
        ("structured_outputs", {"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ("structured_outputs", {"grammar": "root ::= 'a'"}, {"grammar": "root ::= 'a'"}),
        ("structured_outputs", {"json_object": True}, {"json_object": True}),
        ("structured_outputs", {"structural_tag": {"format": {}}},
         {"structural_tag": {"format": {}}}),
        (
            "structured_outputs",
            {
                "json": SCHEMA, "whitespace_pattern": " ", "disable_fallback": True,
                "disable_any_whitespace": True, "disable_additional_properties": True,
            },
            {
                "json": SCHEMA, "whitespace_pattern": " ", "disable_fallback": True,
                "disable_any_whitespace": True, "disable_additional_properties": True,
            },
        ),
    ],
)  # fmt: skip
async def test_constraints_reach_the_engine(
    connect: Any, url: str, body: Any, field: str, value: Any, expected: Any
) -> None:
    engine = FakeEngine("{}")
    answer = await connect(engine).post(url, json={**body, field: value})
    assert answer.status_code == 200, answer.text
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert engine.requests[0].params.structured_outputs == wanted


TAG = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
GBNF = 'root ::= "a" b-1{2,} # two\nb-1 ::= [^\\n]\n'


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": False}}, {"json": False}),
        ({"structured_outputs": {"json": False}}, {"json": False}),
        ({"guided_json": False}, {"json": False}),
        (
            {"response_format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            {"json": SCHEMA},
        ),
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": '{"type": "object"}'}, {"json": '{"type": "object"}'}),
        ({"json_schema": {}}, {"json": {}}),
        ({"grammar": GBNF}, {"grammar": GBNF}),
        ({"grammar": ""}, None),
        ({"grammar": "", "json_schema": SCHEMA, "regex": None}, {"json": SCHEMA}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": GBNF}, {"grammar": GBNF}),
        ({"structural_tag": TAG}, {"structural_tag": TAG}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": GBNF}, {"grammar": GBNF}),
        ({"guided_json_object": True}, {"json_object": True}),
        ({"guided_json_object": False, "guided_decoding_backend": "outlines"}, None),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
            {"json": SCHEMA, "whitespace_pattern": " ?"},
        ),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:disable-any-whitespace"},
            {"json": SCHEMA, "disable_any_whitespace": True},
        ),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "auto:no-additional-properties"},
            {"json": SCHEMA, "disable_additional_properties": True},
        ),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
async def test_spellings_of_other_servers(
    connect: Any, url: str, body: Any, fields: Any, expected: Any, strict: bool
) -> None:
    engine = FakeEngine("{}")
    answer = await connect(engine, strict_requests=strict).post(url, json={**body, **fields})
    assert answer.status_code == 200, answer.text
    wanted = None if expected is None else StructuredOutputsParams(**expected)
    assert engine.requests[0].params.structured_outputs == wanted


async def test_a_text_format_with_a_schema(connect: Any) -> None:
    engine = FakeEngine("{}")
    form = {"type": "json_object", "schema": SCHEMA}
    answer = await connect(engine).post(
        "/v1/responses", json={"input": "a", "text": {"format": form}}
    )
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].params.structured_outputs == StructuredOutputsParams(json=SCHEMA)


@pytest.mark.parametrize(("url", "body"), ROUTES)
@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least one"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "empty"),
        ({"structured_outputs": {"regex": "a" * 8193}}, "structured_outputs.regex", "8192"),
        ({"structured_outputs": {"rejex": "a"}}, "structured_outputs.rejex", "not permitted"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "string"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "exactly one",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "given"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "given",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
            "response_format.json_schema.schema",
            "valid",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "either"),
        (
            {"response_format": {"type": "structural_tag", "format": {}, "triggers": ["a"]}},
            "response_format",
            "either",
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format.triggers",
            "both",
        ),
        (
            {"guided_json": SCHEMA, "structured_outputs": {"regex": "a"}},
            "guided_json",
            "structured_outputs",
        ),
        (
            {"grammar": "root ::= 'a'", "response_format": {"type": "json_object"}},
            "grammar",
            "response_format of type 'json_object'",
        ),
        ({"json_schema": SCHEMA, "grammar": "root ::= 'a'"}, "grammar", "json_schema"),
        ({"regex": "a", "guided_regex": "a"}, "guided_regex", "with regex"),
        ({"guided_regex": ""}, "guided_regex", "empty"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
        (
            {"guided_whitespace_pattern": " ", "structured_outputs": {"json": SCHEMA}},
            "guided_whitespace_pattern",
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend", "xgrammar"),
        (
            {"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar:no-fallback"},
            "guided_decoding_backend",
            "no-fallback",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
            "response_format.json_schema",
            "type 'json_object'",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "schema": SCHEMA,
                    "json_schema": {"schema": SCHEMA},
                }
            },
            "response_format.schema",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "text", "schema": SCHEMA}},
            "response_format.schema",
            "json_object",
        ),
        (
            {"response_format": {"type": "json_schema", "schema": [1]}},
            "response_format.schema",
            "valid",
        ),
    ],
)
async def test_refusals_name_the_field(
    connect: Any, url: str, body: Any, fields: Any, param: str, said: str
) -> None:
    engine = FakeEngine("{}")
    answer = await connect(engine).post(url, json={**body, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert said in error["message"]
    assert engine.requests == []


@pytest.mark.req("SEC-13")
async def test_schemas_are_bounded(connect: Any) -> None:
    deep: Any = {}
    for _ in range(70):
        deep = {"items": deep}
    wide = {"enum": ["x" * 20] * 60_000}
    for schema in (deep, wide):
        answer = await connect().post(
            "/v1/completions", json={"prompt": "a", "structured_outputs": {"json": schema}}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "structured_outputs.json"


async def test_a_form_that_the_engine_refuses_is_named_as_it_came(connect: Any) -> None:
    """The engine knows constraints by one name; clients know several fields."""
    error = RequestError(
        "structured_outputs: 'x' at '#/y' cannot be served", param="structured_outputs"
    )
    client = connect(FakeEngine(reject=error))
    tool = {"type": "function", "function": {"name": "f"}}
    for body, param in (
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
    ):
        for detail in ("", ".json"):
            error = RequestError("'x' at '#/y'", param="structured_outputs" + detail)
            client = connect(FakeEngine(reject=error))
            answer = await client.post("/v1/chat/completions", json={**CHAT, **body})
            shown = param + detail if param == "structured_outputs" else param
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, shown)
