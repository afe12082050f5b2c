"""Errors about constraints: which tool, which place in its schema, which line of a grammar."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from servers import RunningServer, serving

from headrace_core import plugins
from headrace_core.errors import RequestError
from headrace_core.grammar import Vocabulary
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.admission import Admission
from headrace_server.chat.tool_choice import plan_tools

HI = [{"role": "user", "content": "Hi"}]
PARSERS = sorted(plugins.installed("headrace.tool_parsers"))
NOT_STRICT = {"gigachat3", "xlam"}
"""Formats in which no tool can be strict."""
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NOT = {"type": "object", "properties": {"a/b": {"not": {"type": "string"}}, "c": {}}}
DEFINED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/A"}},
    "$defs": {"A": {"type": "array", "items": {"type": "string", "pattern": "("}}},
}
WHOLE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "propertyNames": {"maxLength": 1},
}
NOWHERE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


# Every format, without a server


@pytest.fixture(scope="module")
def admission() -> Iterator[Admission]:
    made = Admission(
        StructuredOutputsConfig(compile_processes=1),
        lambda: Vocabulary([bytes([byte]) for byte in range(256)]),
    )
    yield made
    made.close()


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (NOT, "'tools[1].function.parameters#/properties/a~1b'"),
        (DEFINED, "'tools[1].function.parameters#/$defs/A/items'"),
        (WHOLE, "'tools[1].function.parameters'"),
    ],
)
def test_a_refusal_names_the_tool_and_the_place(
    admission: Admission, name: str, schema: dict[str, Any], place: str
) -> None:
    parser = plugins.load("headrace.tool_parsers", name)
    tools = [tool("good", GOOD), tool("bad", schema), tool("other", GOOD)]
    named = {"type": "function", "function": {"name": "bad"}}
    for choice in ("required", named):
        plan = plan_tools(tools, choice, parser)
        assert plan.constraint is not None
        with pytest.raises(RequestError) as caught:
            admission.admit(plan.constraint)
        plan.sources.name_in(caught.value, plan.constraint, "tools")
        assert place in str(caught.value)
        assert "'#" not in str(caught.value)
        assert str(caught.value).startswith("tools: ")
    tools[1]["function"]["strict"] = True
    plan = None
    with pytest.raises(RequestError) as caught:  # noqa: PT012 - either of them refuses
        plan = plan_tools(tools, "auto", parser)
        assert plan.constraint is not None
        admission.admit(plan.constraint)
    if plan is not None:
        plan.sources.name_in(caught.value, plan.constraint, "tools")
        assert place in str(caught.value)
    elif name not in NOT_STRICT:
        assert str(caught.value).startswith("tools[1].function.parameters")


# Over a real socket


@pytest.fixture(scope="module", params=["hermes", "qwen3_coder"])
def server(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with serving("--enable-auto-tool-choice", "--tool-call-parser", request.param) as running:
        yield running


def post(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    told = {"Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), told)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def refused(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = post(server, path, body)
    assert status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


@pytest.mark.parametrize(
    ("schema", "inside"), [(NOWHERE, "#/properties/a"), (NOT, "#/properties/a~1b"), (WHOLE, "'")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_protocol_names_its_own_field(
    server: RunningServer, schema: dict[str, Any], inside: str, stream: bool
) -> None:
    """A tool that this server does not know is left out, and the others keep their positions."""
    shared = {"model": "headrace-demo", "stream": stream}
    foreign = {"type": "web_search_20250305", "name": "web_search"}
    chat = {"messages": HI, "tools": [tool("good", GOOD), foreign, tool("bad", schema)],
            "tool_choice": "required"}  # fmt: skip
    flat = [{"type": "function", "name": "bad", "parameters": schema}]
    own = [foreign, {"name": "good", "input_schema": GOOD}, {"name": "bad", "input_schema": schema}]
    for path, body, where in (
        ("/v1/chat/completions", chat, "tools[2].function.parameters"),
        ("/v1/responses", {"input": "Hi", "tools": flat, "tool_choice": "required"}, "tools[0].parameters"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9, "tools": own, "tool_choice": {"type": "any"}},
         "tools[2].input_schema"),
    ):  # fmt: skip
        error = refused(server, path, {**shared, **body})
        assert where + inside in error["message"], error
        assert error.get("param", "tools") == "tools"


def test_a_form_beside_strict_tools_is_named_as_such(server: RunningServer) -> None:
    """Both are in one constraint; each place is named in the field that it came by."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOT}}
    body = {"messages": HI, "tools": [tool("good", GOOD)], "response_format": form}
    error = refused(server, "/v1/chat/completions", body)
    assert "#/properties/a~1b'" in error["message"]
    assert "#/format" not in error["message"]
    assert error["param"].startswith("response_format")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": "("}},
         "structured_outputs.whitespace_pattern", "unclosed group"),
        ({"guided_json": GOOD, "guided_whitespace_pattern": "x*"},
         "guided_whitespace_pattern", "matches more than white space"),
        ({"grammar": 'root ::= "a"\n\nb = "c"'}, "grammar", "line 3 column 3: found '='"),
        ({"ebnf": 'root ::= "a" b'}, "ebnf", "line 1 column 14: there is no rule 'b'"),
        ({"guided_json": {"name": "n", "schema": {"type": "objekt"}}}, "guided_json",
         "'type' at '#/schema': 'objekt'"),
        ({"response_format": {"type": "text", "schema": GOOD}}, "response_format.schema",
         "send type 'json_object' or 'json_schema' with it"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema",
         "{'name': ..., 'schema': {...}}"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json", "json"),
        ({"guided_json": 0}, "guided_json", "guided_json"),
        ({"response_format": {"type": "json_object", "schema": 1}}, "response_format.schema", "schema"),
        ({"tools": [tool("good", GOOD)], "tool_choice": "required", "ignore_eos": True}, "ignore_eos",
         "cannot be combined with tool_choice 'required'"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined with guided_regex"),
        ({"guided_choice": ["ab"], "min_tokens": 4}, "min_tokens", "with this guided_choice"),
        ({"structured_outputs": {"regex": "a^b"}}, "structured_outputs.regex", "'^' and '$' must stand"),
        ({"grammar": 'root ::= "a" root'}, "grammar", "line 1: the rule 'root' never ends"),
        ({"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "any_text"}, {"type": "tag", "begin": "<", "end": ">",
                                   "content": {"type": "regex", "pattern": "("}}]}}},
         "structural_tag", "any_text"),
        ({"structural_tag": {"format": {"type": "tag", "begin": "<", "end": ">",
                                        "content": {"type": "regex", "pattern": "("}}}},
         "structural_tag", "'pattern' at '#/format/content': unclosed group"),
        ({"structural_tag": {"structures": [{"begin": "b", "schema": GOOD, "end": ""}], "triggers": ["a"]}},
         "structural_tag", "'begin' at '#/structures/0'"),
    ],
)  # fmt: skip
def test_the_field_and_the_place_are_named(
    server: RunningServer, fields: dict[str, Any], param: str, said: str
) -> None:
    error = refused(server, "/v1/chat/completions", {"messages": HI, "max_tokens": 5, **fields})
    assert said in error["message"], error
    assert error["param"] == param


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"grammar": r'root ::= ([0-9]{2})? "\u00e9" ("a"{3}){2}'}, "éaaaaaa"),
        ({"json_schema": {"name": "n", "schema": {"const": "zebra"}, "strict": True}}, '"zebra"'),
        ({"guided_json": json.dumps({"name": "n", "schema": {"const": "zebra"}})}, '"zebra"'),
        ({"structured_outputs": {"json": {"schema": {"const": "zebra"}}}}, '"zebra"'),
    ],
)
def test_these_constraints_hold(server: RunningServer, fields: dict[str, Any], text: str) -> None:
    body = {"messages": HI, "max_tokens": 60, "seed": 1, **fields}
    status, answer = post(server, "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length"), choice
    assert text in choice["message"]["content"], choice


def test_a_grammar_that_one_request_has_used_up_serves_the_next(server: RunningServer) -> None:
    """The lexer's limit ends the request that comes to it, and no later one."""
    body = {
        "messages": HI,
        "structured_outputs": {"regex": "([a-z ]{0,300}e){0,300}"},
        "temperature": 1.0,
        "max_tokens": 1500,
    }
    reasons = []
    for seed in range(4):
        status, answer = post(server, "/v1/chat/completions", {**body, "seed": seed})
        assert status == 200, answer
        reasons.append(answer["choices"][0]["finish_reason"])
        if reasons[-1] == "error":
            break
    assert reasons[-1] == "error", "the limit was not met: choose another regex"
    status, answer = post(server, "/v1/chat/completions", {**body, "max_tokens": 2, "seed": 0})
    assert answer["choices"][0]["finish_reason"] == "length", answer


@pytest.fixture(scope="module")
def with_xgrammar() -> Iterator[RunningServer]:
    pytest.importorskip("xgrammar")
    with serving("--structured-outputs-config.backend", "xgrammar") as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"grammar": 'root ::=\n  (| "é" |\n  "\\U0001F600") "\\!"'}, ("!", "é!", "😀!")),
        ({"regex": r"^[[:alpha:]]\\$"}, None),
        ({"regex": "^[[:digit:]]{2}!$"}, None),
        ({"regex": r"\d{2}"}, None),
        ({"regex": "^(yes|no)$"}, ("yes", "no")),
    ],
)
def test_a_constraint_means_the_same_with_xgrammar(
    with_xgrammar: RunningServer, fields: dict[str, Any], text: tuple[str, ...] | None
) -> None:
    """Another backend serves the regexes that xgrammar would read otherwise."""
    body = {"messages": HI, "max_tokens": 60, "temperature": 1.0, "seed": 1, **fields}
    status, answer = post(with_xgrammar, "/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop", choice
    content = choice["message"]["content"]
    if text is not None:
        assert content in text
    elif "alpha" in fields["regex"]:
        assert content[:-1].isalpha()
        assert content.endswith("\\")
    else:
        assert content[:2].isdecimal()
        assert len(content) == (3 if "!" in fields["regex"] else 2)


def test_refusals_have_the_same_words_with_xgrammar(with_xgrammar: RunningServer) -> None:
    for fields, said in (
        ({"regex": "a^b"}, "regex: '^' and '$' must stand at the beginning and the end"),
        ({"regex": r"ab\Z"}, "regex: unknown escape"),
        ({"grammar": 'root ::= "a" b'}, "grammar: line 1 column 14: there is no rule 'b'"),
    ):
        error = refused(with_xgrammar, "/v1/chat/completions", {"messages": HI, **fields})
        assert error["message"].startswith(said), error
