"""Unknown fields are found at every depth, and no published field is one."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from typing_extensions import get_type_hints, is_typeddict

from headrace_server.protocols.anthropic.protocol import (
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
)
from headrace_server.protocols.known_fields import MAX_UNKNOWN, KnownFields, RequestObject
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.bodies.completions import CompletionRequest
from headrace_server.protocols.openai.bodies.pooling import EmbeddingTextRequest
from headrace_server.protocols.responses.protocol import ResponsesRequest
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.fakes.pooling import fake_pooling_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
FUNCTION = {"name": "f", "parmeters": {"type": "object"}}
CLAUDE = {"model": "fake-model", "max_tokens": 9}
TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
SCHEMA = {"type": "object", "x-mine": {"y": 1}}


def said(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


CASES: list[tuple[str, dict[str, Any], str, str, str]] = [
    # route, body, name in logs, place in errors, nearest
    (
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
        "tools[].function.parmeters",
        "tools[0].function.parmeters",
        "parameters",
    ),
    (
        CHAT,
        {"messages": HI, "tools": [{"type": "function", "functon": 1, "function": {"name": "f"}}]},
        "tools[].functon",
        "tools[0].functon",
        "function",
    ),
    (
        CHAT,
        {
            "messages": HI,
            "tool_choice": "none",
            "stream": True,
            "stream_options": {"include_useage": True},
        },
        "stream_options.include_useage",
        "stream_options.include_useage",
        "include_usage",
    ),
    (CHAT, said(nam="x"), "messages[].nam", "messages[0].nam", "name"),
    (
        CHAT,
        said(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "a", "txet": "b"}]),
        "messages[].content[].txet",
        "messages[0].content[1].txet",
        "text",
    ),
    (
        CHAT,
        said(
            role="assistant",
            tool_calls=[
                {"id": "c", "type": "function", "function": {"name": "f", "argumnets": "{}"}}
            ],
        ),
        "messages[].tool_calls[].function.argumnets",
        "messages[0].tool_calls[0].function.argumnets",
        "arguments",
    ),
    (
        CHAT,
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schemas": {}, "schema": {}},
            },
        },
        "response_format.json_schema.schemas",
        "response_format.json_schema.schemas",
        "schema",
    ),
    (
        TEXT,
        {"prompt": "a", "response_format": {"type": "text", "shema": {}}},
        "response_format.shema",
        "response_format.shema",
        "schema",
    ),
    (
        "/inference/v1/generate",
        {"token_ids": [72], "sampling_params": {"temprature": 1}},
        "sampling_params.temprature",
        "sampling_params.temprature",
        "temperature",
    ),
    ("/tokenize", said(nam="x"), "messages[].nam", "messages[0].nam", "name"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "txet": 1}]}]},
        "input[].content[].txet",
        "input[0].content[0].txet",
        "text",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": "a", "stauts": "completed"}]},
        "input[].stauts",
        "input[0].stauts",
        "status",
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "strct": True}},
        },
        "text.format.strct",
        "text.format.strct",
        "strict",
    ),
    (
        RESPONSES,
        {"input": "a", "text": {"verbostiy": "low"}},
        "text.verbostiy",
        "text.verbostiy",
        "verbosity",
    ),
    (
        RESPONSES,
        {"input": "a", "reasoning": {"efort": "low"}},
        "reasoning.efort",
        "reasoning.efort",
        "effort",
    ),
    (
        RESPONSES,
        {"input": "a", "tools": [{"type": "function", "name": "f", "parmeters": {}}]},
        "tools[].parmeters",
        "tools[0].parmeters",
        "parameters",
    ),
    (
        MESSAGES,
        {**CLAUDE, "messages": [{"role": "user", "content": "a", "naem": 1}]},
        "messages[].naem",
        "messages[0].naem",
        "",
    ),
    (
        MESSAGES,
        {
            **CLAUDE,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txet": 1}]}],
        },
        "messages[].content[].txet",
        "messages[0].content[0].txet",
        "text",
    ),
    (
        MESSAGES,
        {
            **CLAUDE,
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "a",
                            "cache_control": {"type": "ephemeral", "tll": "5m"},
                        }
                    ],
                }
            ],
        },
        "messages[].content[].cache_control.tll",
        "messages[0].content[0].cache_control.tll",
        "ttl",
    ),
    (
        MESSAGES,
        {**CLAUDE, "messages": HI, "system": [{"type": "text", "text": "a", "txet": 1}]},
        "system[].txet",
        "system[0].txet",
        "text",
    ),
    (
        MESSAGES,
        {**CLAUDE, "messages": HI, "tools": [{"name": "f", "input_schema": {}, "input_shema": {}}]},
        "tools[].input_shema",
        "tools[0].input_shema",
        "input_schema",
    ),
    (
        MESSAGES,
        {**CLAUDE, "messages": HI, "thinking": {"type": "disabled", "budget": 1}},
        "thinking.budget",
        "thinking.budget",
        "budget_tokens",
    ),
    (
        MESSAGES + "/count_tokens",
        {"model": "fake-model", "messages": HI, "tool_choice": {"type": "auto", "nam": "x"}},
        "tool_choice.nam",
        "tool_choice.nam",
        "name",
    ),
    ("/v1/embeddings", said(nam="x"), "messages[].nam", "messages[0].nam", "name"),
    (
        "/score",
        {"text_1": {"text": "a", "txet": "b"}, "text_2": "b"},
        "text_1.txet",
        "text_1.txet",
        "text",
    ),
]


def engine_for(url: str) -> FakeEngine:
    pooled = url in ("/v1/embeddings", "/score")
    return FakeEngine(
        "x", model=fake_pooling_model("embed", "score", embedding_size=4) if pooled else None
    )


@pytest.mark.req("SEC-16")
@pytest.mark.parametrize(("url", "body", "name", "place", "near"), CASES)
async def test_unknown_fields_at_every_depth(
    connect: Any, caplog: pytest.LogCaptureFixture, url: str, body: Any, name: str, place: str, near: str
) -> None:  # fmt: skip
    client = connect(engine_for(url), **TOOLS)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            answer = await client.post(url, json=body)
            assert answer.status_code == 200, answer.text
    told = [r.getMessage() for r in caplog.records if "is unknown" in r.getMessage()]
    assert len(told) == 1
    assert repr(name) in told[0]
    metrics = (await client.get("/metrics")).text
    assert "headrace:unknown_request_fields_total 2.0" in metrics

    answer = await connect(engine_for(url), strict_requests=True, **TOOLS).post(url, json=body)
    assert answer.status_code == 400, answer.text
    text = answer.text
    hint = f"; the nearest known field is {near!r}" if near else '"'
    assert f"{place!r}: unknown field{hint}" in text
    if not url.startswith(MESSAGES):
        assert answer.json()["error"]["param"] == place


FREE: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": HI,
            "metadata": {"a": "b"},
            "store": True,
            "verbosity": "low",
            "service_tier": "flex",
            "prediction": {"type": "content", "content": [{"type": "text", "text": "x"}]},
            "chat_template_kwargs": {"a": {"b": 1}},
            "documents": [{"title": "a", "mine": "b"}],
            "vllm_xargs": {"a": 1},
            "logit_bias": {"1": 1},
            "user": "x",
            "safety_identifier": "x",
            "prompt_cache_key": "x",
            "prompt_cache_retention": "24h",
        },
    ),
    (
        CHAT,
        {
            "messages": HI,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            },
        },
    ),
    (
        CHAT,
        {
            "messages": HI,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
        },
    ),
    (
        CHAT,
        {
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": "a",
                    "refusal": None,
                    "annotations": [],
                    "audio": None,
                    "function_call": None,
                    "tool_calls": None,
                    "reasoning": None,
                    "reasoning_content": None,
                    "surprise": None,
                },
                *HI,
            ]
        },
    ),
    (
        CHAT,
        {
            "messages": HI,
            "surprise": None,
            "stream": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": True,
                "include_obfuscation": False,
            },
        },
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "metadata": {"a": "b"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                *HI,
                {"type": "local_shell_call", "call_id": "c", "action": {"any": {"thing": 1}}},
            ]
        },
    ),
    (
        MESSAGES,
        {
            **CLAUDE,
            "messages": HI,
            "metadata": {"user_id": "a", "more": "b"},
            "tools": [
                {"name": "f", "input_schema": SCHEMA},
                {"type": "web_search_20250305", "name": "s", "more": 1},
            ],
        },
    ),
    (
        MESSAGES,
        {
            **CLAUDE,
            "messages": [
                *HI,
                {
                    "role": "assistant",
                    "content": [
                        {
                            "type": "tool_use",
                            "id": "c",
                            "name": "f",
                            "input": {"any": {"thing": 1}},
                        },
                        {
                            "type": "web_search_tool_result",
                            "tool_use_id": "w",
                            "content": [{"type": "x", "url": "y", "page_age": 1}],
                        },
                    ],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
            ],
        },
    ),
    ("/v1/embeddings", {"input": ["a", "b"]}),
]


@pytest.mark.parametrize(("url", "body"), FREE)
@pytest.mark.parametrize("setting", ["strict_requests", "hardened"])
async def test_free_data_and_published_fields_are_known(
    connect: Any, url: str, body: Any, setting: str
) -> None:
    client = connect(engine_for(url), **{setting: True}, **TOOLS)
    answer = await client.post("http://localhost" + url, json=body)
    assert answer.status_code == 200, answer.text


async def test_a_request_counts_a_name_once_however_often_it_comes(connect: Any) -> None:
    client = connect()
    body = {"messages": [{"role": "user", "content": "a", "nam": str(i)} for i in range(50)]}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert "headrace:unknown_request_fields_total 1.0" in (await client.get("/metrics")).text


async def test_many_unknown_names_cost_little(connect: Any) -> None:
    client = connect()
    body = {"messages": [{"role": "user", "content": "a", **{f"x{i}": 1 for i in range(9000)}}]}
    assert (await client.post(CHAT, json=body)).status_code == 200
    told = f"headrace:unknown_request_fields_total {MAX_UNKNOWN}.0"
    assert told in (await client.get("/metrics")).text


# The published types, walked along with what is known here

READ = ("text", "thinking", "tool_use", "tool_result")
"""Anthropic's blocks that are read; others are left out, or refused by their type."""


def _members(kind: Any) -> Iterator[Any]:
    """TypedDicts within an annotation, lists and unions opened."""
    if is_typeddict(kind):
        yield kind
    elif get_origin(kind) in (Union, types.UnionType, list, Annotated, Required, NotRequired) or (
        get_origin(kind) is not None
        and getattr(get_origin(kind), "__name__", "") in ("Iterable", "Sequence")
    ):
        for inner in get_args(kind):
            yield from _members(inner)


def _objects(kind: Any) -> Iterator[type[RequestObject]]:
    """This server's models within an annotation."""
    if isinstance(kind, type) and issubclass(kind, RequestObject):
        yield kind
    for inner in get_args(kind):
        yield from _objects(inner)


def _type_of(theirs: Any) -> str | None:
    kind = get_type_hints(theirs).get("type")
    return (
        next((str(a) for a in get_args(kind) if isinstance(a, str)), None)
        if get_origin(kind) is Literal
        else None
    )


def _missing(theirs: Any, ours: Any, path: str, seen: tuple[Any, ...] = ()) -> Iterator[str]:
    """Fields of a published type that are unknown here.

    Args:
        ours: a :class:`KnownFields`, or models of which one fits.
    """
    if theirs in seen:
        return
    kind = _type_of(theirs)
    if isinstance(ours, KnownFields):
        if not ours.covers(kind):
            return
        below: dict[str, Any] = dict(ours.fields)
    else:
        fitting = [
            m
            for m in ours
            if m.model_fields.get("type") is None
            or kind is None
            or kind in get_args(m.model_fields["type"].annotation)
            or m.model_fields["type"].annotation is str
        ]
        fitting = [m for m in fitting if m is not ContentBlock or kind in READ]
        if not fitting:
            return  # a type that is refused by its name
        below = {}
        for model in fitting:
            for name, info in model.model_fields.items():
                shown = info.alias or name
                below[shown] = model.also_known.get(shown) or [*_objects(info.annotation)] or None
            below |= {n: b for n, b in model.also_known.items() if n not in below}
            below |= dict.fromkeys(getattr(model, "refused", ()))
    for name, hint in get_type_hints(theirs).items():
        place = f"{path}.{name}"
        if name not in below:
            yield f"{place} ({theirs.__name__})"
        elif below[name]:
            for member in _members(hint):
                yield from _missing(member, below[name], place, (*seen, theirs))


LOOKED_THROUGH = {"openai": (3, 54), "anthropic": (2, 12)}
"""Releases whose fields are known: one of tomorrow fails no commit of today."""


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("openai.types.chat.completion_create_params:CompletionCreateParamsStreaming", ChatRequest),
        (
            "openai.types.completion_create_params:CompletionCreateParamsStreaming",
            CompletionRequest,
        ),
        ("openai.types.embedding_create_params:EmbeddingCreateParams", EmbeddingTextRequest),
        (
            "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
            ResponsesRequest,
        ),
        ("anthropic.types.message_create_params:MessageCreateParamsStreaming", MessagesRequest),
        (
            "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
            CountTokensRequest,
        ),
    ],
)
def test_no_published_field_is_unknown(path: str, ours: Any) -> None:
    module, _, name = path.partition(":")
    theirs = getattr(pytest.importorskip(module), name)
    package = module.partition(".")[0]
    release = tuple(int(part) for part in version(package).split(".")[:2])
    missing = list(_missing(theirs, [ours], ""))
    if missing and release > LOOKED_THROUGH[package]:
        pytest.skip(f"{package} {version(package)} has fields that nobody has looked at: {missing}")
    assert missing == []
