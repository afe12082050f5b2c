"""Right request bodies of every kind, and endless ones that are nearly right.

A body is a tree of JSON. A mutant has one to four places changed: a value replaced by a nasty one or by a
part of another body, a name misspelt, something left out, doubled or wrapped; one in twenty has its bytes
damaged besides.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from malformed import NASTY

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
_FUNCTION = {"name": "weather", "description": "Tell it.", "parameters": _SCHEMA, "strict": False}
_SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["\n", "x"], "n": 2,
    "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1, "min_tokens": 1,
    "logit_bias": {"5": 3.5, "7": -100}, "stop_token_ids": [9], "bad_words": ["no"], "ignore_eos": True,
    "include_stop_str_in_output": True, "skip_special_tokens": False, "allowed_token_ids": [5, 6, 7, 8],
    "truncate_prompt_tokens": 8, "priority": 0, "user": "u", "max_tokens": 3,
}  # fmt: skip
_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "What is 1 + 2?"}], "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "a"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "user", "content": "And 2 + 3?"},
]  # fmt: skip
_TOOLS = [{"type": "function", "function": _FUNCTION}]

BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, **_SAMPLING}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 2, "stream": True,
                         "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4,
                         "structured_outputs": {"regex": "[a-z]{2}", "whitespace_pattern": "[ ]?"}}),
    ("/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": _TURNS, "logprobs": True, "top_logprobs": 2, **_SAMPLING}),
    ("/v1/chat/completions", {"messages": _TURNS[:2], "tools": _TOOLS, "tool_choice": "required",
                              "max_tokens": 9}),
    ("/v1/chat/completions", {"messages": _TURNS[:2], "tools": _TOOLS, "parallel_tool_calls": False,
                              "tool_choice": {"type": "function", "function": {"name": "weather"}},
                              "max_completion_tokens": 9}),
    ("/v1/chat/completions", {"messages": _TURNS, "max_tokens": 5, "stream": True, "response_format": {
        "type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA, "strict": True}}}),
    ("/v1/chat/completions", {"messages": _TURNS[:2], "max_tokens": 4, "structured_outputs": {
        "grammar": 'root ::= ("a" | [b-d]{2})+ # all\n'},
        "chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/chat/completions", {"messages": _TURNS[:2], "max_tokens": 4, "response_format": {
        "type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}}),
    ("/v1/chat/completions", {"messages": _TURNS[:2], "max_tokens": 4, "structured_outputs": {
        "choice": ["yes", "no"]}, "reasoning_effort": "low", "metadata": {"a": "b"}, "store": False}),
    ("/v1/chat/completions/batch", {"messages": [_TURNS[:2], _TURNS], "max_tokens": 2}),
    ("/v1/chat/completions/render", {"messages": _TURNS, "tools": _TOOLS}),
    ("/v1/completions/render", {"prompt": ["x", "y"], "max_tokens": 2}),
    ("/v1/responses", {"input": "x", "max_output_tokens": 3, "instructions": "Be brief.", "store": False}),
    ("/v1/responses", {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "sun"}],
        "max_output_tokens": 3, "stream": True, "tools": [{"type": "function", **_FUNCTION}],
        "tool_choice": "auto", "text": {"format": {"type": "json_schema", "name": "s", "schema": _SCHEMA}},
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low"}}),
    ("/v1/messages", {"model": "headrace-demo",
                      "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                                   {"role": "assistant", "content": [
                                       {"type": "tool_use", "id": "t", "name": "weather",
                                        "input": {"city": "a"}}]},
                                   {"role": "user", "content": [
                                       {"type": "tool_result", "tool_use_id": "t", "content": "sun"}]}],
                      "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 4,
                      "tools": [{"name": "weather", "input_schema": _SCHEMA}],
                      "tool_choice": {"type": "any"}, "stop_sequences": ["x"], "top_k": 4}),
    ("/v1/messages", {"model": "headrace-demo", "messages": [{"role": "user", "content": "x"}],
                      "max_tokens": 3, "stream": True, "thinking": {"type": "disabled"},
                      "metadata": {"user_id": "u"}}),
    ("/v1/messages/count_tokens", {"model": "headrace-demo", "system": "s",
                                   "messages": [{"role": "user", "content": "x"}],
                                   "tools": [{"name": "weather", "input_schema": _SCHEMA}]}),
    ("/inference/v1/generate", {"token_ids": [5, 6],
                                "sampling_params": {"max_tokens": 3, "logprobs": 1, "n": 2}}),
    ("/tokenize", {"messages": _TURNS, "return_token_strs": True, "tools": _TOOLS}),
    ("/tokenize", {"prompt": "x", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
)  # fmt: skip
"""(path, body), each answered 200 by a server with :data:`SERVER`."""
SERVER = (
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3",
    "--max-model-len", "512", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning",
)  # fmt: skip
"""The demo model, so that constraints and calls are real."""

_VALUES = [json.loads(text, parse_int=float) for text in NASTY if len(text) < 300]
_SPELT = [(path, json.dumps(body)) for path, body in BODIES]


def mutants(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """(path, body), the same for the same seed."""
    rng = random.Random(seed)
    parts = [part for _, body in BODIES for part in _parts(body)]
    for _ in range(count):
        path, text = rng.choice(_SPELT)
        body: Any = json.loads(text)
        for _ in range(rng.randint(1, 4)):
            body = _changed(body, rng, parts)
        spelt = json.dumps(body).encode()
        yield path, _damaged(spelt, rng) if rng.random() < 0.05 else spelt


def _parts(value: Any) -> Iterator[Any]:
    yield value
    children = (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    for child in children:
        yield from _parts(child)


def _changed(body: Any, rng: random.Random, parts: list[Any]) -> Any:
    """The same tree with one place changed; the tree itself where it is not one any more."""
    places = [part for part in _parts(body) if isinstance(part, dict | list) and part]
    if not places:
        return copy.deepcopy(rng.choice(parts))
    place = rng.choice(places)
    key = rng.choice(list(place) if isinstance(place, dict) else range(len(place)))
    kind = rng.randrange(8)
    if kind == 0:
        del place[key]
    elif kind in (1, 2):
        place[key] = copy.deepcopy(rng.choice(_VALUES))
    elif kind in (3, 4):
        place[key] = copy.deepcopy(rng.choice(parts))
    elif kind == 5:
        place[key] = rng.choice(([place[key]], {"a": place[key]}, str(place[key])))
    elif kind == 6 and isinstance(place, list):
        place[key:key] = [copy.deepcopy(place[key])] * rng.choice((1, 2, 50))
    elif kind == 6 and isinstance(place, dict):
        place[rng.choice((key + "s", key.upper(), "", "type"))] = place.pop(key)
    else:
        place[key] = _near(place[key], rng)
    return body


def _near(value: Any, rng: random.Random) -> Any:
    """A value of the same kind, a little off."""
    if isinstance(value, bool) or value is None:
        return rng.choice((True, False, None))
    if isinstance(value, int | float):
        return rng.choice((value + 1, -value, value * 1000, value + 0.5, 0, str(value)))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return (
            value[:at]
            + rng.choice(("", "\x00", "\ud800", "é", "{", '"', "\\", " ", value))
            + value[at + 1 :]
        )
    return value


def _damaged(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice((
        data[:at],
        data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        data[:at] + data[at : at + 30] + data[at:],
    ))  # fmt: skip
