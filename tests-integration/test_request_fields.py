"""Fields of requests over a real socket: unknown ones at every depth, and constraints by other names."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import serving

AGENTS = Path(__file__).parent / "data" / "agents"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
GBNF = r"""# as llama.cpp's users write it
root ::= item-1{2} (
  "yes" | # one
  "no"
)
item-1 ::= "- " [^\r\nA-Z\x00-\x1F]{1,3} "\n"
"""
FORMS = [
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        r'\s*\{\s*"a"\s*:\s*[12]\s*\}',
    ),
    ({"json_schema": SCHEMA}, r'\s*\{\s*"a"\s*:\s*[12]\s*\}'),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, r'\{"a":[12]\}'),
    ({"grammar": GBNF}, r"(- [^\r\nA-Z]{1,3}\n){2}(yes|no)"),
    ({"ebnf": GBNF}, r"(- [^\r\nA-Z]{1,3}\n){2}(yes|no)"),
    ({"guided_grammar": GBNF}, r"(- [^\r\nA-Z]{1,3}\n){2}(yes|no)"),
    ({"grammar": r'root ::= ([\u0041-\x43]{2}){2} "\U0001F600"{0} "!"'}, "([A-C]{2}){2}!"),
    ({"regex": "x{3}[yz]"}, "x{3}[yz]"),
    ({"guided_regex": "x{3}[yz]"}, "x{3}[yz]"),
    ({"guided_choice": ["left", "right"], "guided_decoding_backend": "outlines"}, "left|right"),
]


@pytest.fixture(scope="module")
def strict():
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--max-model-len", "1536")
    with serving("--strict-requests", *words) as running:
        yield running


def post(server, path, body, headers=()):
    told = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), told)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("kind", ["chat", "text"])
@pytest.mark.parametrize(("fields", "pattern"), FORMS)
def test_constraints_of_other_servers_hold(server, kind, fields, pattern):
    path, said = {"chat": ("/v1/chat/completions", {"messages": HI}),
                  "text": ("/v1/completions", {"prompt": "Hi"})}[kind]  # fmt: skip
    status, answer = post(server, path, {**said, "max_tokens": 60, "seed": 1, **fields})
    assert status == 200, answer
    [choice] = answer["choices"]
    text = choice["text"] if kind == "text" else choice["message"]["content"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [*FORMS[1:], ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right")],
)
def test_constraints_hold_on_other_wires(server, path, fields, pattern):
    is_response = path == "/v1/responses"
    said = {"input": "Hi", "max_output_tokens": 60} if is_response else {
        "model": "headrace-demo", "max_tokens": 60, "messages": HI,
    }  # fmt: skip
    status, answer = post(server, path, {**said, "seed": 1, **fields})
    assert status == 200, answer
    [block] = answer["output"][0]["content"] if is_response else answer["content"]
    assert re.fullmatch(pattern, block["text"]), block["text"]
    status, refused = post(server, path, {**said, "regex": "a", "guided_choice": ["a"]})
    assert status == 400, refused
    assert "exactly one constraint" in refused["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_sampling_fields_hold_on_other_wires(server, path):
    is_response = path == "/v1/responses"
    said = {"input": "Hi", "max_output_tokens": 9} if is_response else {
        "model": "headrace-demo", "max_tokens": 9, "messages": HI,
    }  # fmt: skip
    fields = {"ignore_eos": True, "allowed_token_ids": [70, 71], "temperature": 0}
    status, answer = post(server, path, {**said, **fields})
    assert status == 200, answer
    assert answer["usage"]["output_tokens"] == 9
    [block] = answer["output"][0]["content"] if is_response else answer["content"]
    status, chat = post(
        server, "/v1/chat/completions", {"messages": HI, "max_completion_tokens": 9, **fields}
    )
    assert block["text"] == chat["choices"][0]["message"]["content"]


def test_an_empty_prompt_is_not_rendered(server):
    body = {"prompt": "", "add_special_tokens": False}
    for path in ("/v1/completions", "/v1/completions/render"):
        status, told = post(server, path, body)
        assert (status, told["error"]["param"]) == (400, "prompt"), told
        assert told["error"]["message"] == "prompt: must hold at least one token"


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_s_errors_name_places_of_the_request(server, stream):
    several = {"prompt": ["a", ""], "add_special_tokens": False, "stream": stream}
    regex = {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "("}}}
    for path, body, place in (
        ("/v1/completions", several, "prompt[1]"),
        (
            "/inference/v1/generate",
            {**regex, "stream": stream},
            "sampling_params.structured_outputs.regex",
        ),
    ):
        status, told = post(server, path, body)
        assert (status, told["error"]["param"]) == (400, place), told
        assert told["error"]["message"].startswith(place)


@pytest.mark.parametrize(
    "grammar", ['root ::= <think> "a"', 'root ::= "a" (="b")', "no grammar", r"root ::= [\d]"]
)
def test_what_of_other_dialects_is_not_read_is_refused(server, grammar):
    body = {"prompt": "Hi", "max_tokens": 4, "grammar": grammar}
    status, answer = post(server, "/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "grammar"


def test_two_ways_at_once(server):
    body = {"prompt": "Hi", "guided_json": SCHEMA, "ebnf": GBNF}
    status, answer = post(server, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "guided_json")
    assert "ebnf" in answer["error"]["message"]


def test_a_misspelt_field_of_a_tool(server, strict):
    tool = {"type": "function", "function": {"name": "f", "parmeters": {"type": "object"}}}
    other = {**tool, "function": {**tool["function"], "name": "g"}}
    body = {"messages": HI, "max_tokens": 1, "tools": [tool, other]}
    before = server.metric("unknown_request_fields_total")
    for _ in range(2):
        assert post(server, "/v1/chat/completions", body)[0] == 200
    told = [line for line in server.log if "'tools[].function.parmeters'" in line]
    assert len(told) == 1
    assert server.metric("unknown_request_fields_total") == before + 2
    status, answer = post(strict, "/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.parmeters")
    assert "'parameters'" in answer["error"]["message"]


OWN = {
    "codex": {"client_metadata"},
    "continue": {"tools[].displayTitle", "tools[].group", "tools[].isInstant", "tools[].readonly",
                 "tools[].wouldLikeTo"},
}  # fmt: skip
"""Fields of published clients that are in no API's documentation."""


@pytest.mark.parametrize("client", sorted(file.stem for file in AGENTS.glob("*.json")))
def test_what_published_clients_send_is_known(strict, client):
    case = json.loads((AGENTS / f"{client}.json").read_text())
    found = set()
    for request in case["requests"]:
        limit = "max_output_tokens" if "/responses" in case["path"] else "max_tokens"
        body = (
            {"max_completion_tokens": 1}
            if "max_completion_tokens" in request["body"]
            else {limit: 1}
        )
        body = {**request["body"], **body, "stream": False}
        body.pop("stream_options", None)
        if body.get("thinking", {}).get("budget_tokens"):
            body["max_tokens"] = body["thinking"]["budget_tokens"] + 1
        while True:
            status, answer = post(strict, case["path"], body, case["headers"])
            if status == 200:
                break
            assert "unknown field" in answer["error"]["message"], answer
            place = answer["error"]["message"].split("'")[1]
            found.add(re.sub(r"\[\d+\]", "[]", place))
            _remove(body, place)
    assert found == OWN.get(client, set())


def _remove(body, place):
    *way, last = [int(p) if p.isdigit() else p for p in re.findall(r"[^.\[\]]+", place)]
    for step in way:
        body = body[step]
    del body[last]


_OF_WIRES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"grammar": "root ::= ("}, "grammar"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"regex": r"x\by"}, "regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("path", _OF_WIRES)
def test_a_constraint_that_cannot_be_is_named_as_it_was_sent(server, path, fields, name, stream):
    body = {"model": "headrace-demo", **_OF_WIRES[path], **fields, "stream": stream}
    status, answer = post(server, path, body)
    assert status == 400
    message = answer["error"]["message"]
    assert message.startswith(f"{name}: ")
    if name == "regex":
        assert "word boundaries" in message


@pytest.mark.parametrize("path", _OF_WIRES)
def test_cache_retention_has_no_effect_on_any_wire(server, path):
    body = {"model": "headrace-demo", **_OF_WIRES[path], "prompt_cache_retention": "24h"}
    assert post(server, path, body)[0] == 200
