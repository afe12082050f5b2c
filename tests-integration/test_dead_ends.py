"""Requests whose own fields leave no next token: 400 before anything is generated, or an answer that ends
with ``error`` and says why. Never a 5xx, and never at others' expense."""

from __future__ import annotations

import itertools
import json
import threading

import httpx
import pytest
from servers import serving

MODEL = "headrace-demo"
HELLO = [{"role": "user", "content": "Hello!"}]
FORM = "the constraint on the form (structured_outputs)"
ONE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"],
       "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": ONE}}
NAMED = {"type": "function", "function": {"name": "f"}}
AMBIGUOUS = (
    "root ::= s\n" + 's ::= s s | s s s | "a" | "b" | "ab" | "ba" | "aba" | s "a" s | "bb" s | ""'
)
WIDE = {
    "type": "object",
    "properties": {
        f"p{i}": {"anyOf": [{"type": "integer"}, {"type": "string"}]} for i in range(340)
    },
}
LATE = {
    "type": "object",
    "properties": {
        "first": {"type": "string", "minLength": 20, "maxLength": 20},
        "last": {"anyOf": [WIDE] * 4},
    },
    "required": ["first", "last"],
    "additionalProperties": False,
}
"""A schema on which the library gives up, but not at its beginning."""


@pytest.fixture(scope="module")
def server():
    words = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes",
             "--structured-outputs-config.backend", "guidance",
             "--structured-outputs-config.disable_fallback", "true",
             "--structured-outputs-config.disable_any_whitespace", "true")  # fmt: skip
    with serving(*words) as running:
        yield running


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def chat(http, **body):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 100, "temperature": 0, **body}
    return http.post("/v1/chat/completions", json=body)


def completion(http, **body):
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 100, "temperature": 0, **body}
    return http.post("/v1/completions", json=body)


def events(answer):
    assert answer.status_code == 200, answer.text
    found = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def ending(answer):
    """(finish_reason, stop_reason) of the only choice, streamed or not."""
    if answer.headers["content-type"].startswith("application/json"):
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
    else:
        choice = events(answer)[-1]["choices"][0]
    return choice["finish_reason"], choice.get("stop_reason")


DEAD_ENDS = {
    "regex and min_tokens": (
        {"structured_outputs": {"regex": "a{3}"}, "min_tokens": 40}, f"{FORM} and min_tokens",
    ),
    "regex and allowed_token_ids": (
        {"structured_outputs": {"regex": "zzz"}, "allowed_token_ids": [70]},
        f"{FORM} and allowed_token_ids",
    ),
    "choice and bad_words": (
        {"structured_outputs": {"choice": ["a"]}, "bad_words": ["a"]}, f"{FORM} and bad_words",
    ),
    "a late schema": ({"structured_outputs": {"json": LATE}}, "matching the constraint was given up"),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", [chat, completion])
@pytest.mark.parametrize("case", DEAD_ENDS)
def test_a_dead_end_is_an_answer_that_says_why(http, ask, case, stream):
    fields, why = DEAD_ENDS[case]
    reason, told = ending(ask(http, stream=stream, **fields))
    assert reason == "error"
    assert why in told


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_and_min_tokens(http, stream):
    answer = chat(http, tools=[TOOL], tool_choice=NAMED, min_tokens=50, stream=stream)
    reason, told = ending(answer)
    assert (reason, "min_tokens" in told) == ("error", True)
    assert "arguments" in answer.text


def test_one_of_several_choices_ends_alone(http):
    wanted = {"regex": "x|[a-c]{300}"}
    for seed in range(30):
        answer = chat(
            http, n=4, temperature=2.0, seed=seed, min_tokens=20, structured_outputs=wanted
        )
        reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
        if set(reasons) == {"error", "length"}:
            return
    pytest.fail("no seed gave both")


def test_a_response_fails_with_its_reason(http):
    form = {"format": {"type": "json_schema", "name": "x", "schema": LATE}}
    body = {"model": MODEL, "input": "Hello", "text": form, "temperature": 0}
    whole = http.post("/v1/responses", json=body)
    assert whole.status_code == 200, whole.text
    answer = whole.json()
    assert answer["status"] == "failed"
    assert answer["error"]["code"] == "invalid_prompt"
    assert "given up" in answer["error"]["message"]
    *_, last = events(http.post("/v1/responses", json=body | {"stream": True}))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == answer["error"]


LONG = {"type": "object", "properties": {"a": {"const": "abc"}}, "required": ["a"],
        "additionalProperties": False}  # fmt: skip
TEXT = {"format": {"type": "json_schema", "name": "n", "schema": LONG}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": LONG}}
CALLED = {"name": "f", "parameters": LONG}
WIRES = {
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 400}, {
        "response_format": {"response_format": FORMAT},
        "tools": {"tools": [{"type": "function", "function": CALLED}], "tool_choice": NAMED,
                  "response_format": FORMAT},
    }),
    "/v1/completions": ({"prompt": "Hi", "max_tokens": 400}, {
        "response_format": {"response_format": FORMAT},
    }),
    "/v1/responses": ({"input": "Hello!", "max_output_tokens": 400}, {
        "text.format": {"text": TEXT},
        "tools": {"tools": [{"type": "function", **CALLED}], "text": TEXT,
                  "tool_choice": {"type": "function", "name": "f"}},
    }),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 400}, {
        "output_config.format": {"output_config": {"format": {"type": "json_schema", "schema": LONG}}},
        "tools": {"tools": [{"name": "f", "input_schema": LONG}],
                  "tool_choice": {"type": "tool", "name": "f"}},
    }),
}  # fmt: skip
SHARED = {
    "structured_outputs": {"structured_outputs": {"regex": "a{3}"}}, "regex": {"regex": "a{3}"},
    "guided_json": {"guided_json": LONG}, "ebnf": {"ebnf": 'root ::= "aaa"'},
    "guided_grammar": {"guided_grammar": 'root ::= "aaa"'}, "json_schema": {"json_schema": LONG},
}  # fmt: skip
NAMED_FIELDS = [
    (path, field, fields)
    for path, (_, own) in WIRES.items()
    for field, fields in (own | SHARED).items()
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "field", "fields"), NAMED_FIELDS)
def test_a_dead_end_names_the_client_s_field(http, path, field, fields, stream):
    body = {"model": MODEL, "temperature": 0, "min_tokens": 300, "stream": stream, **WIRES[path][0]}
    answer = http.post(path, json={**body, **fields})
    assert f"no token is possible with the constraint on the form ({field}) and min_tokens" in (
        answer.text
    )


MANY = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(600)}}
REFUSED = {
    "choice and min_tokens": (
        {"structured_outputs": {"choice": ["yes", "maybe"]}, "min_tokens": 6}, "min_tokens",
        "at most 5",
    ),
    "a large regex": (
        {"structured_outputs": {"regex": "a{1000000}"}}, "structured_outputs.regex", "backend guidance",
    ),
    "many optional properties": (
        {"structured_outputs": {"json": {"items": MANY}}}, "structured_outputs.json",
        "'properties' at '#/items': 600 of them are not required: must be at most 350",
    ),
    "a bound out of reach": (
        {"structured_outputs": {"json": {"properties": {"a": {"minimum": 1e30}}}}},
        "structured_outputs.json", "'minimum' at '#/properties/a': 1e+30: must be at most",
    ),
    "a constant that would be rounded": (
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": {"const": 2**64 + 1}}}},
        "response_format", "'const' at '#': 18446744073709551617",
    ),
    "a count that no output has": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {
            "properties": {"a": {"type": "string", "minLength": 10**30}}}}}],
         "tool_choice": "required"}, "tools", "'minLength' at 'tools[0].function.parameters#/properties",
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_known_to_be_impossible_is_refused_by_name(http, case, stream):
    fields, param, why = REFUSED[case]
    answer = chat(http, stream=stream, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert why in error["message"]


def test_bad_words_that_leave_no_allowed_token(http):
    (token,) = http.post("/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()[
        "tokens"
    ]
    answer = chat(http, allowed_token_ids=[token], bad_words=["a"])
    assert answer.status_code == 400
    assert "with bad_words, none of its tokens is possible" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "allowed_token_ids"


def test_many_choices_and_long_ones(http):
    texts = [f"text {i * 7919 % 100003}" for i in range(10_000)]
    for seed in range(3):
        answer = chat(http, structured_outputs={"choice": texts}, temperature=1.5, seed=seed)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] in texts
    answer = chat(http, structured_outputs={"choice": ["ab" * 500_000]}, max_tokens=30)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert ("ab" * 500).startswith(choice["message"]["content"])


def test_integers_up_to_a_wide_bound(http):
    schema = {"type": "integer", "minimum": 10**17, "maximum": 1e30}
    for seed in range(10):
        answer = chat(http, structured_outputs={"json": schema}, temperature=1.5, seed=seed)
        (choice,) = answer.json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert 10**17 <= int(choice["message"]["content"]) <= 10**30


def test_an_ambiguous_grammar_ends_alone(http, server):
    """Over sockets: it ends with its reason, and each of its neighbours gets all of its tokens."""
    others = [None] * 3

    def run(index):
        with httpx.Client(base_url=server.url, timeout=120) as own:
            body = {"min_tokens": 150, "max_tokens": 150, "stream": True, "ignore_eos": True}
            others[index] = completion(own, prompt=f"{index} and", **body)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    reason, told = ending(
        chat(http, structured_outputs={"grammar": AMBIGUOUS}, max_tokens=600, min_tokens=600,
             temperature=1.0, seed=1)
    )  # fmt: skip
    for thread in threads:
        thread.join()
    assert reason == "error"
    assert "takes too long" in told or "given up" in told
    assert [ending(answer) for answer in others] == [("length", None)] * 3


class Watched(threading.Thread):
    """A streamed completion, and how many tokens have come."""

    def __init__(self, url, **body):
        super().__init__()
        self.url, self.body = url, {"model": MODEL, "temperature": 1, "stream": True, **body}
        self.count, self.reason = 0, None
        self.begun = threading.Event()

    def run(self):
        with (
            httpx.Client(base_url=self.url, timeout=120) as own,
            own.stream("POST", "/v1/completions", json=self.body) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.reason = choice["finish_reason"]
                    self.count += 1
                    self.begun.set()


def test_neighbours_of_an_ambiguous_grammar_take_more_steps_than_it(server):
    """Masks that take long are computed beside the steps: its neighbour goes on meanwhile, where both
    got a token from each step before. Steps are counted, not timed."""
    beside = Watched(
        server.url,
        prompt="x",
        max_tokens=2000,
        ignore_eos=True,
        stream_options={"include_usage": False},
    )
    slow = Watched(
        server.url, prompt="y", max_tokens=600, min_tokens=600, seed=1,
        structured_outputs={"grammar": AMBIGUOUS},
    )  # fmt: skip
    beside.start()
    assert beside.begun.wait(60)
    slow.start()
    assert slow.begun.wait(60)
    before = beside.count
    slow.join()
    more = beside.count - before
    assert slow.reason == "error"
    assert slow.count > 20
    beside.join()  # it may have ended before
    assert beside.reason == "length"
    assert more > 1.2 * slow.count


def constraint(**fields):
    return {"structured_outputs": fields}


FIELDS = [
    {"min_tokens": 12}, {"ignore_eos": True}, {"allowed_token_ids": [70, 71]},
    {"allowed_token_ids": [2]}, {"bad_words": ["a", "{"]}, {"stop": ["a", "1"]},
    {"stop_token_ids": [65, 66]}, {"logit_bias": {"70": 100, "2": -100}}, {"n": 2, "temperature": 1},
    {"logprobs": 2}, {"use_beam_search": True, "n": 2, "temperature": 0}, {"best_of": 1},
    {"thinking_token_budget": 1}, constraint(regex="[a-c]{3}"), constraint(choice=["yes", "no"]),
    constraint(grammar='root ::= "x" | "(" root ")"'), constraint(json=ONE),
    constraint(json_object=True),
    constraint(structural_tag={"structures": [{"begin": "<f>", "schema": ONE, "end": "</f>"}],
                               "triggers": ["<f"]}),
]  # fmt: skip
CHAT_ONLY = [
    {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL], "tool_choice": NAMED},
    {"tools": [TOOL]}, {"response_format": {"type": "json_object"}},
]  # fmt: skip


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("stream", [False, True])
def test_no_pair_of_fields_is_the_servers_failure(http, stream):
    """Each pair of fields that restrict the output, on both wires: an answer, or a refusal that names a
    field."""
    reasons = set()
    for one, other in itertools.combinations([*FIELDS, *CHAT_ONLY], 2):
        if one.keys() & other.keys():
            continue
        fields = {"max_tokens": 16, "temperature": 1, "seed": 1, **one, **other}
        only_chat = (one in CHAT_ONLY) or (other in CHAT_ONLY) or "thinking_token_budget" in fields
        for ask in [chat] if only_chat else [chat, completion]:
            if ask is chat and "logprobs" in fields:
                fields = {**fields, "logprobs": True, "top_logprobs": 2}
            answer = ask(http, stream=stream, **fields)
            assert answer.status_code in (200, 400), (one, other, answer.text)
            if answer.status_code == 400:
                assert answer.json()["error"]["param"], (one, other, answer.text)
            elif stream:
                assert not [e for e in events(answer) if "error" in e], (one, other, answer.text)
                reasons.add(events(answer)[-1]["choices"][0]["finish_reason"])
            else:
                reasons |= {choice["finish_reason"] for choice in answer.json()["choices"]}
    assert {"stop", "length", "error"} <= reasons
