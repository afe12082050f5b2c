"""Requests of coding clients, as published, are answered: whole, and as a stream that they can read."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from servers import serving

FOLDER = Path(__file__).parent / "data" / "agents"
CASES = [
    pytest.param(file.stem, index, id=f"{file.stem}: {request['what']}")
    for file in sorted(FOLDER.glob("*.json"))
    for index, request in enumerate(json.loads(file.read_text())["requests"])
]
MODEL = "headrace-demo"
TRUNCATED = [
    '{"path": "a.py", "content": "x = ',
    '{"path"',
    "{",
    "not JSON",
    '{"a": [1, {"b": "\\',
    "[1",
]


@pytest.fixture(scope="module")
def server():
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser",
             "qwen3", "--max-model-len", "1536")  # fmt: skip
    with serving(*words) as running:
        yield running


def post(server, path, body, headers=()):
    """(status, body)."""
    told = {"Content-Type": "application/json", **dict(headers)}
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), told)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def short(path, body):
    """The same request, with less to be written: what it is about is how it is read."""
    if "/responses" in path:
        return {**body, "max_output_tokens": 16, "temperature": 0}
    if "/messages" in path:
        return {"temperature": 0, **body}
    limit = {} if "max_completion_tokens" in body else {"max_tokens": 16}
    return {**body, **limit, "temperature": 0}


@pytest.mark.keep(8, every_value=False)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("client", "index"), CASES)
def test_a_published_request(server, client, index, stream):
    case = json.loads((FOLDER / f"{client}.json").read_text())
    body = short(case["path"], case["requests"][index]["body"])
    if not stream:
        body.pop("stream_options", None)
    status, text = post(server, case["path"], {**body, "stream": stream}, case["headers"])
    assert status == 200, text
    form = case["path"].partition("?")[0].rpartition("/")[2]
    if stream:
        READ[form](text)
    else:
        answer = json.loads(text)
        assert answer.get("error") is None
        assert answer.get("choices") or answer.get("content") is not None or answer.get("output")


def events(text):
    """(event, data) of each."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        found.append((lines.get("event"), lines["data"]))
    return found


def read_chat(text):
    *chunks, last = [data for _, data in events(text)]
    assert last == "[DONE]"
    decoded = [json.loads(chunk) for chunk in chunks]
    assert decoded[0]["choices"][0]["delta"]["role"] == "assistant"
    ends = [c["choices"][0]["finish_reason"] for c in decoded if c["choices"]]
    assert ends[-1] in ("stop", "length", "tool_calls")
    assert not any(ends[:-1])


def read_messages(text):
    named = events(text)
    decoded = [json.loads(data) for _, data in named]
    assert [name for name, _ in named] == [event["type"] for event in decoded]
    kinds = [event["type"] for event in decoded if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def read_responses(text):
    named = events(text)
    decoded = [json.loads(data) for _, data in named]
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    assert decoded[-1]["type"] in ("response.completed", "response.incomplete"), decoded[-1]


READ = {"completions": read_chat, "messages": read_messages, "responses": read_responses}


def test_what_is_left_out_is_logged_once_by_name(server):
    for _ in range(2):
        tools = [{"type": "web_search_20250305", "name": "web_search"}]
        body = {"model": MODEL, "max_tokens": 4, "tools": tools,
                "messages": [{"role": "user", "content": "a"}]}  # fmt: skip
        assert post(server, "/v1/messages", body)[0] == 200
    told = [line for line in server.log if "web_search_20250305" in line]
    assert len(told) == 1
    assert "WARNING" in told[0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"max_tokens": 4, "tools": [{"type": "bash_20250124", "name": "bash"}],
                          "tool_choice": {"type": "tool", "name": "bash"}}),
        ("/v1/messages", {"max_tokens": 4, "tools": [{"type": "no_such", "name": "x"}]}),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}],
                                  "tool_choice": {"type": "custom", "custom": {"name": "x"}}}),
        ("/v1/chat/completions", {"tools": [{"type": "custom", "custom": {"name": "x"}}],
                                  "tool_choice": "required"}),
        ("/v1/chat/completions", {"tools": [{"type": "functoin", "function": {"name": "x"}}]}),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}),
        ("/v1/responses", {"tools": [{"type": "custom", "name": "x"}],
                           "tool_choice": {"type": "custom", "name": "x"}}),
        ("/v1/responses", {"tools": [{"type": "custom_2", "name": "x"}]}),
    ],
)  # fmt: skip
def test_a_foreign_tool_that_is_asked_for_by_name_and_an_unknown_one(server, path, body):
    said = (
        {"input": "a"} if "responses" in path else {"messages": [{"role": "user", "content": "a"}]}
    )
    status, text = post(server, path, {"model": MODEL, **said, **body})
    assert status == 400
    assert "tool" in text


@pytest.mark.parametrize("arguments", TRUNCATED)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_whose_arguments_were_cut(server, arguments, stream):
    """A client keeps what it was given when an answer was cut, and sends it back."""
    user, call = {"role": "user", "content": "Write a.py"}, {"name": "f", "arguments": arguments}
    function = {"name": "f", "parameters": {"type": "object"}}
    chat = [user, {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": "Error"}]  # fmt: skip
    blocks = [user, {"role": "assistant", "content": [
                  {"type": "tool_use", "id": "c", "name": "f", "input": arguments}]},
              {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]  # fmt: skip
    items = [user, {"type": "function_call", "call_id": "c", **call},
             {"type": "function_call_output", "call_id": "c", "output": "Error"}]  # fmt: skip
    common = {"model": MODEL, "stream": stream}
    for path, body in (
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 2,
                                  "tools": [{"type": "function", "function": function}]}),
        ("/v1/messages", {"messages": blocks, "max_tokens": 2,
                          "tools": [{"name": "f", "input_schema": {}}]}),
        ("/v1/responses", {"input": items, "max_output_tokens": 2,
                           "tools": [{"type": "function", **function}]}),
        ("/tokenize", {"messages": chat}),
    ):  # fmt: skip
        if path == "/tokenize":
            common = {"model": MODEL}
        status, text = post(server, path, {**common, **body})
        assert status == 200, (path, text)
        assert '"error":{' not in text


def test_reasoning_that_others_encrypted_is_left_out(server):
    """A conversation that began elsewhere goes on here."""
    thoughts = [{"type": "reasoning", "summary": [], "encrypted_content": content}
                for content in ("gAAAA", "hr1.!", "hr1." + "/w==")]  # fmt: skip
    body = {
        "model": MODEL,
        "max_output_tokens": 2,
        "input": [*thoughts, {"role": "user", "content": "a"}],
    }
    assert post(server, "/v1/responses", body)[0] == 200


@pytest.mark.parametrize(
    ("edit", "status"),
    [
        ({"type": "clear_tool_uses_20250919"}, 200),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 90}}, 400),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 90},
          "keep": {"type": "tool_uses", "value": 5}}, 200),
        ({"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}, 400),
        ({"type": "clear_tool_uses_20250919", "keep": 1}, 400),
        ({"type": "compact_20260112"}, 200),
        ({"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 90}}, 400),
        ({"type": "clear_everything"}, 400),
    ],
)  # fmt: skip
def test_edits_of_the_context(server, edit, status):
    """Edits that cannot apply here are accepted, others are refused by name."""
    messages = [{"role": "user", "content": "Look."}]
    for number in range(5):
        call = {"type": "tool_use", "id": f"t{number}", "name": "Read", "input": {"p": "a"}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": "x"}
        messages += [
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
    body = {"model": MODEL, "max_tokens": 2, "messages": messages}
    edits = {"context_management": {"edits": [edit]}}
    got, text = post(server, "/v1/messages", {**body, **edits})
    assert got == status, text
    assert got == 200 or "context_management" in text


def test_old_thoughts_are_dropped_as_asked(server):
    """No more is counted than without the edit, however many turns keep their thoughts."""
    thought = {"type": "thinking", "thinking": "Well, well, well.", "signature": ""}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    ask = {"role": "user", "content": "b"}
    body = {"model": MODEL, "messages": [ask, said, ask, said, ask]}

    def count(*edits):
        more = {"context_management": {"edits": list(edits)}}
        status, text = post(server, "/v1/messages/count_tokens", {**body, **more})
        assert status == 200, text
        return json.loads(text)["input_tokens"]

    kind = "clear_thinking_20251015"
    none = count({"type": kind, "keep": {"type": "thinking_turns", "value": 0}})
    assert count() >= count({"type": kind, "keep": "all"}) >= count({"type": kind}) >= none
