"""/v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_core.errors import EngineDead, RequestError
from headrace_testing.fakes.engine import FakeEngine

URL = "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
ADD = {"name": "add", "description": "Adds.", "input_schema": {"properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
}
THINK = {"type": "enabled", "budget_tokens": 1024}


def filled(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": "fake-model", "max_tokens": 2000, "messages": HI, **body}


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json=filled(body))
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, status: int = 400, /, **body: Any) -> str:
    """The message of an error; checks the form and the type."""
    answer = await client.post(URL, json=filled(body))
    assert answer.status_code == status, answer.text
    return told(answer)


TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
         405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
         500: "api_error", 503: "overloaded_error"}  # fmt: skip


def told(answer: Any) -> str:
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"]["type"] == TYPES[answer.status_code]
    message = body["error"]["message"]
    assert isinstance(message, str)
    return message


def named(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            head, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert head == f"event: {found[-1]['type']}"
    return found


async def streamed(client: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await client.post(URL, json=filled({"stream": True, **body}))
    assert answer.status_code == 200, answer.text
    return named(answer.text)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds from a stream."""
    message: dict[str, Any] = {}
    pieces: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces[event["index"]] = ""
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                (piece,) = [v for k, v in event["delta"].items() if k != "type"]
                pieces[event["index"]] += piece
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    for index, block in enumerate(message["content"]):
        match block["type"]:
            case "text":
                block |= {"text": pieces[index], "citations": None}
            case "thinking":
                block["thinking"] = pieces[index]
            case "tool_use":
                block["input"] = json.loads(pieces[index] or "{}")
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in b.items() if k != "id"} for b in message["content"]]
    return {**message, "id": "", "content": content}


async def test_the_answer_has_every_field(connect: Any) -> None:
    answer = await post(connect(FakeEngine("Hello.")))
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message", "role": "assistant", "model": "fake-model",
        "content": [{"type": "text", "text": "Hello.", "citations": None}],
        "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {"input_tokens": 26, "output_tokens": 7, "cache_creation_input_tokens": 0,
                  "output_tokens_details": None,
                  "cache_read_input_tokens": 0},
    }  # fmt: skip


async def test_the_events(connect: Any) -> None:
    engine = FakeEngine(f"<think>hm</think>ab{CALL}", tokens_per_output=100)
    events = await streamed(connect(engine, **PARSERS), tools=[ADD], thinking=THINK)
    assert [e["type"] for e in events] == [
        "message_start", "ping", *["content_block_start", "content_block_delta",
        "content_block_stop"] * 3, "message_delta", "message_stop",
    ]  # fmt: skip
    assert [e["content_block"]["type"] for e in events if "content_block" in e] == [
        "thinking", "text", "tool_use",
    ]  # fmt: skip
    assert events[0]["message"]["usage"]["input_tokens"] == 26
    assert [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"] == [
        "thinking_delta", "text_delta", "input_json_delta",
    ]  # fmt: skip
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


_TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "thought ", "\n\n", CALL, "größe ", "<tool", "{}", " "]
    ),
    max_size=8,
).map("".join)


@pytest.mark.req("REL-16")
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(text=_TEXTS, size=st.integers(1, 12), pushes=st.booleans(), shown=st.booleans())
async def test_streams_equal_the_whole(
    connect: Any, text: str, size: int, pushes: bool, shown: bool
) -> None:
    client = connect(FakeEngine(text, tokens_per_output=size, pushes=pushes), **PARSERS)
    body = {"tools": [ADD], "thinking": THINK} if shown else {"tools": [ADD]}
    whole = await post(client, **body)
    assert without_ids(put_together(await streamed(client, **body))) == without_ids(whole)
    assert shown or not any(b["type"] == "thinking" for b in whole["content"])


@pytest.mark.parametrize(
    ("body", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["l"]}, "stop_sequence", "l"),
        ({"max_tokens": 100_000}, "end_turn", None),
    ],
)
async def test_stop_reasons(connect: Any, body: Any, reason: str, sequence: Any) -> None:
    client = connect(FakeEngine("Hello."))
    whole = await post(client, **body)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert without_ids(put_together(await streamed(client, **body))) == without_ids(whole)


async def test_a_full_context_is_not_the_limit(connect: Any) -> None:
    client = connect(FakeEngine("x" * 5000))
    assert (await post(client, max_tokens=100_000))[
        "stop_reason"
    ] == "model_context_window_exceeded"


async def test_cached_tokens_are_no_input_tokens(connect: Any) -> None:
    usage = (await post(connect(FakeEngine("x", cached_tokens=20))))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (6, 20)


async def test_messages_become_a_chat(connect: Any) -> None:
    engine = FakeEngine("ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1?", "cache_control": {
            "type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Sum.", "signature": "s"},
            {"type": "text", "text": "Let me."},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
             "content": [{"type": "text", "text": "bad"}]},
            {"type": "text", "text": "And?"}, {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    await post(connect(engine), messages=messages, system=[{"type": "text", "text": "Be brief."}])
    made = [{k: v for k, v in m.items() if k != "reasoning_content"}
            for m in engine.requests[0].prompt.messages]  # type: ignore[union-attr]  # fmt: skip
    assert made == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me.", "reasoning": "Sum.", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}]},
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "Error: bad"},
        {"role": "user", "content": [{"type": "text", "text": "And?"},
                                     {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip


async def test_the_last_assistant_message_is_continued(connect: Any) -> None:
    engine = FakeEngine(" world")
    await post(connect(engine), messages=[*HI, {"role": "assistant", "content": "Hello"}])
    assert engine.requests[0].prompt_text == "<user>Hi</user><assistant>Hello"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
async def test_an_empty_message_at_the_end_begins_nothing(
    connect: Any, path: str, content: Any
) -> None:
    engine = FakeEngine("Hi")
    client = connect(engine)
    hello = {"role": "user", "content": "Hello"}
    answers = []
    for more in ([], [{"role": "assistant", "content": content}]):
        body = filled({"messages": [hello, *more]})
        if path != URL:
            body.pop("max_tokens", None)
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    if path == URL:
        assert engine.requests[0].prompt == engine.requests[1].prompt
    else:
        assert answers[0] == answers[1]


class StrictEngine(FakeEngine):
    """Cannot continue a message, as with templates that change its text."""

    def _take_in(self, *args: Any) -> Any:
        raise RequestError(
            "continue_final_message: the chat template does not write the last message as it is",
            param="continue_final_message",
        )


async def test_what_cannot_be_continued_is_named_in_the_clients_words(connect: Any) -> None:
    begun = {"role": "assistant", "content": "Well"}
    words = await refused(
        connect(StrictEngine()), messages=[{"role": "user", "content": "x"}, begun]
    )
    assert words == "messages: the chat template does not write the last message as it is"
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    thought = {"type": "thinking", "thinking": "x", "signature": ""}
    for block in (use, thought):
        message = {"role": "assistant", "content": [block]}
        words = await refused(connect(), messages=[{"role": "user", "content": "x"}, message])
        assert "messages[1].content: an assistant's message at the end is continued" in words
    words = await refused(connect(), messages=[{"role": "assistant", "content": ""}])
    assert "messages[0].content: must not be empty" in words


async def test_thinking_is_the_templates_switch(connect: Any) -> None:
    engine = FakeEngine("<think>hm</think>x")
    client = connect(engine, reasoning_parser="qwen3")
    on = await post(client, thinking=THINK)
    assert [b["type"] for b in on["content"]] == ["thinking", "text"]
    off = await post(client, thinking={"type": "disabled"})
    assert [b["type"] for b in off["content"]] == ["text"]
    await post(client, thinking={"type": "adaptive"})
    kwargs = [r.prompt.chat_template_kwargs for r in engine.requests]  # type: ignore[union-attr]
    assert kwargs == [
        {"enable_thinking": True, "thinking": True},
        {"enable_thinking": False, "thinking": False},
        {},
    ]


async def test_tools_reach_the_template(connect: Any) -> None:
    engine = FakeEngine(CALL + CALL)
    client = connect(engine, **PARSERS)
    answer = await post(
        client, tools=[ADD], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    (call,) = answer["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"a": 1})
    assert call["id"].startswith("toolu_")
    assert answer["stop_reason"] == "tool_use"
    assert engine.requests[0].prompt.tools == [  # type: ignore[union-attr]
        {"type": "function", "function": {"name": "add", "description": "Adds.",
         "parameters": {"type": "object", "properties": {}}}}
    ]  # fmt: skip
    none = await post(client, tools=[ADD], tool_choice={"type": "none"})
    assert none["content"][0]["type"] == "text"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].source: type = 'None': must be base64 or url"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}]}]},
         "this model takes text only"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]},
         "no tool_use of that id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"tools": [{"type": "no_such_20250124", "name": "bash"}]}, "'no_such_20250124'"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "tool"}}, "needs a name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, "budget_tokens"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"service_tier": "fast"}, "service_tier"),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(connect: Any, body: Any, words: str) -> None:
    assert words in await refused(connect(**PARSERS), **body)


async def test_errors_have_this_protocols_form(connect: Any) -> None:
    client = connect(api_key=("secret",), max_body_bytes=1000)
    key = {"x-api-key": "secret"}
    assert told(await client.post(URL, json=filled({}))) == "Unauthorized"
    assert (
        told(await client.post(URL, json=filled({}), headers={"x-api-key": "x"})) == "Unauthorized"
    )
    assert (await client.post(URL, json=filled({}), headers=key)).status_code == 200
    bearer = {"authorization": "Bearer x", **key}
    assert (await client.post(URL, json=filled({}), headers=bearer)).status_code == 401
    unknown = await client.post(URL, json=filled({"model": "x"}), headers=key)
    assert "'x' is not served" in told(unknown)
    assert unknown.status_code == 404
    assert (await client.get(URL, headers=key)).status_code == 405
    told(await client.get(URL, headers=key))
    nowhere = told(await client.post(URL + "/other", headers=key))
    assert nowhere == "there is no /v1/messages/other here; did you mean /v1/messages?"
    large = await client.post(URL, json=filled({"system": "x" * 2000}), headers=key)
    assert large.status_code == 413
    told(large)
    broken = await client.post(
        URL, content="{", headers={**key, "content-type": "application/json"}
    )
    assert told(broken).startswith("the body is not valid JSON: it ends")
    # Other routes keep their own.
    assert (await client.post("/v1/responses", json={})).json() == {"error": "Unauthorized"}


async def test_failures_have_this_protocols_form(connect: Any) -> None:
    full = connect(FakeEngine("x", max_running=0))
    answer = await full.post(URL, json=filled({}))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    told(answer)
    assert "secret" not in await refused(connect(FakeEngine(reject=EngineDead("secret"))), 500)
    assert "secret" not in await refused(connect(FakeEngine(reject=ValueError("secret"))), 500)
    events = await streamed(connect(FakeEngine("Hello.", fail_after=3)))
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": (
        "the engine failed on this request; other requests go on")}}  # fmt: skip
    assert "message_stop" not in [e["type"] for e in events]


@pytest.mark.req("REL-05")
async def test_a_client_that_goes_ends_the_work(live: Any, until: Any) -> None:
    engine = FakeEngine("Hello." * 100, delay=0.02)
    server = await live(engine)
    async with httpx2.AsyncClient(base_url=server.url) as client:
        body = filled({"stream": True})
        async with client.stream("POST", URL, json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
    await until(lambda: engine.num_running == 0)
    assert len(engine.aborted) == 1


async def test_counting(connect: Any) -> None:
    engine = FakeEngine("x")
    client = connect(engine, **PARSERS)
    body = {"model": "fake-model", "messages": HI, "system": "Be brief.", "tools": [ADD]}
    answer = await client.post(URL + "/count_tokens", json=body)
    assert answer.status_code == 200, answer.text
    usage = (await post(client, system="Be brief.", tools=[ADD]))["usage"]
    assert answer.json() == {"input_tokens": usage["input_tokens"]}
    assert len(engine.requests) == 1
    missing = await client.post(URL + "/count_tokens", json={"model": "fake-model"})
    assert "messages" in told(missing)


async def test_a_budget_of_thoughts_reaches_an_engine_that_can_tell_them(connect: Any) -> None:
    engine = FakeEngine("<think>so</think>yes")
    body = filled({"thinking": THINK})
    for options, budget in (({"reasoning_parser": "qwen3"}, 1024), ({}, None)):
        answer = await connect(engine, **options).post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        assert engine.requests[-1].params.thinking_token_budget == budget
