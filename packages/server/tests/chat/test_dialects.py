"""What chats, responses and messages say of one answer must be the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace_core.errors import GenerateError
from headrace_core.request import ChatPrompt
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

HI = [{"role": "user", "content": "Hi"}]
PARSERS = {
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "enable_prompt_tokens_details": True,
}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
TOOLS: dict[str, Any] = {
    "chat": CHAT_TOOLS,
    "responses": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
    "messages": [{"name": "add", "input_schema": PARAMETERS}],
}
URLS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
GPT_OSS = fake_served_model(architecture="GptOssForCausalLM", has_chat_template=False)
CALLS = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
    '<|message|>{"a": 1}<|call|><|start|>assistant to=functions.add<|channel|>commentary'
    '<|message|>{"a": 2}'
)
SAID = "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant<|channel|>final<|message|>Hi!"


def request(dialect: str, **body: Any) -> dict[str, Any]:
    """A body that asks the same in each."""
    match dialect:
        case "chat":
            made = {"messages": HI}
        case "responses":
            made = {"input": HI}
        case _:
            made = {"messages": HI, "max_tokens": 2000, "model": "fake-model",
                    "thinking": {"type": "adaptive"}}  # fmt: skip
    return {**made, **body}


async def ask(client: Any, dialect: str, **body: Any) -> Any:
    """The whole answer; of a stream: its events."""
    answer = await client.post(URLS[dialect], json=request(dialect, **body))
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def usage_of(client: Any, dialect: str, **body: Any) -> Any:
    """(prompt, cached, output, reasoning) as a dialect reports it."""
    if dialect == "chat" and body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    told = await ask(client, dialect, **body)
    if dialect == "chat":
        used = (told[-1] if isinstance(told, list) else told)["usage"]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        thought = (used["completion_tokens_details"] or {"reasoning_tokens": 0})["reasoning_tokens"]
        return (used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"],
                used["completion_tokens"], thought)  # fmt: skip
    if dialect == "responses":
        used = (told[-1]["response"] if isinstance(told, list) else told)["usage"]
        return (used["input_tokens"], used["input_tokens_details"]["cached_tokens"],
                used["output_tokens"], used["output_tokens_details"]["reasoning_tokens"])  # fmt: skip
    if isinstance(told, list):
        (used,) = [e["usage"] for e in told if e["type"] == "message_delta"]
    else:
        used = told["usage"]
    cached = used["cache_read_input_tokens"]
    thought = (used["output_tokens_details"] or {"thinking_tokens": 0})["thinking_tokens"]
    return used["input_tokens"] + cached, cached, used["output_tokens"], thought


CASES = [
    ("Hello.", {}, 0, 7),
    ("<think>hmm</think>Hello.", {}, 3, 25),
    ('<think>hmm</think><tool_call>{"name": "add", "arguments": {}}</tool_call>', {"tools": 1}, 3, 74),
    ("<think>hmm</think>Hello.", {"limit": 10}, 3, 10),
    ("Hello.", {"stop": "l"}, 0, 3),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize(("text", "asked", "thought", "output"), CASES)
async def test_usage_is_the_same(
    connect: Any, text: str, asked: Any, thought: int, output: int, pushes: bool, stream: bool
) -> None:
    limits = {"chat": "max_completion_tokens", "responses": "max_output_tokens",
              "messages": "max_tokens"}  # fmt: skip
    stops = {"chat": "stop", "responses": "stop", "messages": "stop_sequences"}
    for dialect in URLS:
        body: dict[str, Any] = {"stream": stream}
        if "tools" in asked:
            body["tools"] = TOOLS[dialect]
        if "limit" in asked:
            body[limits[dialect]] = asked["limit"]
        if "stop" in asked:
            body[stops[dialect]] = [asked["stop"]]
        engine = FakeEngine(text, cached_tokens=2, tokens_per_output=4, pushes=pushes)
        used = await usage_of(connect(engine, **PARSERS), dialect, **body)
        prompt = len("<user>Hi</user><assistant>")
        assert used == (prompt, 2, output, thought), dialect


@pytest.mark.parametrize("shown", [True, False])
async def test_the_usage_of_several_answers(connect: Any, shown: bool) -> None:
    engine = FakeEngine(["<think>hmm</think>A", "<think>mm</think>B"])
    client = connect(engine, **PARSERS)
    body = {"n": 2, "include_reasoning": shown}
    whole = await usage_of(client, "chat", **body)
    assert whole == (26, 0, 20 + 19, 5)  # what is hidden is counted
    assert await usage_of(client, "chat", stream=True, **body) == whole


@pytest.mark.parametrize("dialect", URLS)
async def test_the_effort_reaches_the_template(connect: Any, dialect: str) -> None:
    body = {"chat": {"reasoning_effort": "low"}, "responses": {"reasoning": {"effort": "low"}},
            "messages": {"output_config": {"effort": "low"}}}[dialect]  # fmt: skip
    engine = FakeEngine("ok")
    await ask(connect(engine), dialect, **body)
    prompt: Any = engine.requests[0].prompt
    assert prompt.chat_template_kwargs["reasoning_effort"] == "low"


async def test_fields_are_named_as_the_client_spells_them(connect: Any) -> None:
    client = connect(FakeEngine("ok", model=GPT_OSS))
    body = request("responses", reasoning={"effort": "xhigh"})
    error = (await client.post(URLS["responses"], json=body)).json()["error"]
    assert error["param"] == "reasoning.effort"
    plain = connect(FakeEngine("ok"))
    body = request("responses", text={"format": {"type": "json_schema", "name": 7}})
    error = (await plain.post(URLS["responses"], json=body)).json()["error"]
    assert error["param"].startswith("text.format")
    body = request("messages", output_config={"format": {"type": "json_schema", "schema": {}},
                                              "effort": "max"}, stop_sequences=["x"] * 65)  # fmt: skip
    answer = await plain.post(URLS["messages"], json=body)
    assert "stop_sequences" in answer.json()["error"]["message"]


# Errors in the middle


@pytest.mark.req("REL-03")
@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("dialect", URLS)
async def test_an_error_in_the_middle_ends_a_stream_in_form(
    connect: Any, dialect: str, pushes: bool
) -> None:
    """In the middle of a call's arguments: every event before is whole JSON of the same answer."""
    text = '<think>hmm</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine = FakeEngine(text, fail_after=66, pushes=pushes)
    client = connect(engine, **PARSERS)
    told = await ask(client, dialect, stream=True, tools=TOOLS[dialect])
    words = "the engine failed on this request; other requests go on"
    *before, last = told
    if dialect == "chat":
        assert (last["error"]["message"], last["error"]["code"]) == (words, 500)
        assert len({chunk["id"] for chunk in before}) == 1
        assert not any(chunk["choices"][0]["finish_reason"] for chunk in before)
    elif dialect == "responses":
        assert (last["type"], last["response"]["error"]["message"]) == ("response.failed", words)
        ids = {e["response"]["id"] for e in told if "response" in e}
        assert len(ids) == 1
        items = last["response"]["output"]
        assert [(i["type"], i["status"]) for i in items] == [
            ("reasoning", "completed"), ("function_call", "incomplete"),
        ]  # fmt: skip
        added = [e["item"]["id"] for e in told if e["type"] == "response.output_item.added"]
        assert added == [i["id"] for i in items]
    else:
        assert last == {"type": "error", "error": {"type": "api_error", "message": words}}
        assert [e["type"] for e in before].count("message_start") == 1
        assert before[-1]["type"] == "content_block_delta"
    assert engine.num_running == 0


async def test_a_failure_before_the_first_event_is_a_status(connect: Any) -> None:
    for dialect in URLS:
        client = connect(FakeEngine(reject=GenerateError("x")))
        answer = await client.post(URLS[dialect], json=request(dialect, stream=True))
        assert answer.status_code == 500, dialect
        assert answer.headers["content-type"] == "application/json"


# gpt-oss: its own format on every wire


async def in_pieces(client: Any, **body: Any) -> dict[str, Any]:
    """The message that a client builds from a chat's stream, and why it ended."""
    built: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for chunk in await ask(client, "chat", stream=True, **body):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            built[name] += delta.get(name, "")
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                built["calls"][call["index"]] = [call["function"]["name"], ""]
            built["calls"][call["index"]][1] += call["function"].get("arguments", "")
        built["finish_reason"] = choice["finish_reason"]
    return built


@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_a_gpt_oss_chat(connect: Any, size: int) -> None:
    engine = FakeEngine(CALLS, model=GPT_OSS, tokens_per_output=size)
    client = connect(engine)
    whole = await ask(client, "chat", tools=CHAT_TOOLS, reasoning_effort="high")
    (choice,) = whole["choices"]
    message = choice["message"]
    calls = [c["function"] for c in message["tool_calls"]]
    assert calls == [
        {"name": "add", "arguments": '{"a": 1}'},
        {"name": "add", "arguments": '{"a": 2}'},
    ]
    assert (message["reasoning"], message["content"]) == ("Look.", "Wait.")
    assert choice["finish_reason"] == "tool_calls"
    assert whole["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 5, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    }  # fmt: skip
    text = engine.requests[0].prompt_text
    assert text.startswith("<|start|>system<|message|>")
    assert "Reasoning: high" in text
    assert "type add = (_: {" in text
    assert text.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert engine.requests[0].add_special_tokens is False
    assert await in_pieces(client, tools=CHAT_TOOLS) == {
        "content": "Wait.", "reasoning": "Look.", "finish_reason": "tool_calls",
        "calls": {0: ["add", '{"a": 1}'], 1: ["add", '{"a": 2}']},
    }  # fmt: skip


async def test_gpt_oss_answers_by_what_was_asked(connect: Any) -> None:
    client = connect(FakeEngine(SAID, model=GPT_OSS, tokens_per_output=3))
    choices = (await ask(client, "chat", n=2, include_reasoning=False))["choices"]
    assert [c["message"]["content"] for c in choices] == ["Hi!", "Hi!"]
    assert [c["message"]["reasoning"] for c in choices] == [None, None]
    assert choices[0]["finish_reason"] == "stop"
    client = connect(FakeEngine(CALLS, model=GPT_OSS, tokens_per_output=3))
    one = await ask(client, "chat", tools=CHAT_TOOLS, parallel_tool_calls=False)
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert len((await in_pieces(client, tools=CHAT_TOOLS, parallel_tool_calls=False))["calls"]) == 1
    one = await ask(client, "responses", tools=TOOLS["responses"], parallel_tool_calls=False)
    assert [i["type"] for i in one["output"]] == ["reasoning", "message", "function_call"]
    for field, value in {"use_beam_search": True, "continue_final_message": True,
                         "reasoning_effort": "max", "documents": [{"text": "x"}]}.items():  # fmt: skip
        answer = await client.post(URLS["chat"], json=request("chat", **{field: value}))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("reasoning_parser", ["", "openai_gptoss"])
async def test_forced_calls_of_gpt_oss_in_its_channels(
    connect: Any, reasoning_parser: str, dialect: str, thinks: bool
) -> None:
    """The form describes the reasoning, so that it holds from the first token on if the engine knows it."""
    call = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    thought = "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant"
    engine = FakeEngine(thought * thinks + call, model=GPT_OSS, tokens_per_output=3)
    client = connect(engine, **({"reasoning_parser": reasoning_parser} if reasoning_parser else {}))
    choice = {"type": "any"} if dialect == "messages" else "required"
    told = await ask(client, dialect, tools=TOOLS[dialect], tool_choice=choice)
    constraint = engine.requests[0].params.structured_outputs
    assert constraint is not None
    assert constraint.enable_in_reasoning == bool(reasoning_parser)
    assert "to=functions.add" in json.dumps(constraint.structural_tag)
    if dialect == "messages":
        assert told["content"][-1]["input"] == {"a": 1}
        assert told["stop_reason"] == "tool_use"
        return
    if dialect == "responses":
        item = told["output"][-1]
        assert (item["name"], item["arguments"], item["status"]) == ("add", '{"a": 1}', "completed")
        return
    (one,) = told["choices"]
    assert one["finish_reason"] == "tool_calls"
    assert one["message"]["content"] is None
    assert one["message"]["reasoning"] == ("Greet." if thinks else None)
    assert one["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    for limit in range(len(thought * thinks) + 1, len(thought * thinks + call), 6):
        (cut,) = (
            await ask(client, dialect, tools=TOOLS[dialect], tool_choice=choice, max_tokens=limit)
        )["choices"]
        assert (cut["message"]["content"] or "", cut["finish_reason"]) == ("", "length")
        for found in cut["message"].get("tool_calls", []):
            assert '{"a": 1}'.startswith(found["function"]["arguments"])


async def test_the_count_of_a_gpt_oss_chat_is_its_usage(connect: Any) -> None:
    client = connect(FakeEngine(SAID, model=GPT_OSS))
    for body in ({"messages": HI}, {"messages": HI, "tools": CHAT_TOOLS}):
        used = (await client.post(URLS["chat"], json=body)).json()["usage"]["prompt_tokens"]
        assert (await client.post("/tokenize", json=body)).json()["count"] == used


async def test_parsers_of_another_format_win(connect: Any) -> None:
    """What the operator says counts; the format's own names change nothing."""
    own = {"enable_auto_tool_choice": True, "tool_call_parser": "openai",
           "reasoning_parser": "openai_gptoss"}  # fmt: skip
    client = connect(FakeEngine(CALLS, model=GPT_OSS), **own)
    message = (await ask(client, "chat", tools=CHAT_TOOLS))["choices"][0]["message"]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a": 1}', '{"a": 2}']
    client = connect(FakeEngine("<think>x</think>y", model=GPT_OSS), reasoning_parser="qwen3")
    message = (await ask(client, "chat"))["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("x", "y")


@pytest.mark.parametrize("dialect", URLS)
async def test_the_operators_template_wins_over_the_gpt_oss_format(
    connect: Any, dialect: str
) -> None:
    engine = FakeEngine("x", model=GPT_OSS)
    client = connect(engine, chat_template="{{ messages[0].content }}")
    await ask(client, dialect)
    prompt = engine.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.chat_template is None, "the engine has it already"


SCHEMA = {
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "type": "object",
}
ABOUT = "The weather of a day."
ARGUMENTS = '{"days": 3, "city": "Bern", "far": 1.5, "big": 12345678901234567890123}'
TALKS: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [
            {"type": "function",
             "function": {"name": "weather", "description": ABOUT, "parameters": SCHEMA}},
            {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
        ],
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("Rain?", "Or sun?")]},
            {"role": "assistant", "content": "Let me see.", "reasoning": "Look.",
             "tool_calls": [{"id": "c1", "type": "function",
                             "function": {"name": "weather", "arguments": ARGUMENTS}}]},
            {"role": "tool", "tool_call_id": "c1", "name": "weather",
             "content": [{"type": "text", "text": t} for t in ("rain", "wind")]},
            {"role": "user", "content": "Thanks."},
        ],
    },
    "responses": {
        "tools": [
            {"type": "function", "description": ABOUT, "parameters": SCHEMA, "name": "weather"},
            {"type": "function", "name": "stop", "parameters": {"type": "object"}},
        ],
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": t}
                                         for t in ("Rain?", "Or sun?")]},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Look."}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1",
             "output": [{"type": "input_text", "text": t} for t in ("rain", "wind")]},
            {"role": "user", "content": "Thanks."},
        ],
    },
    "messages": {
        "tools": [
            {"input_schema": SCHEMA, "description": ABOUT, "name": "weather"},
            {"name": "stop", "input_schema": {}},
        ],
        "system": "Be short.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("Rain?", "Or sun?")]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": json.loads(ARGUMENTS)},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1",
                 "content": [{"type": "text", "text": t} for t in ("rain", "wind")]},
                {"type": "text", "text": "Thanks."},
            ]},
        ],
    },
}  # fmt: skip
"""One conversation, as each spells it."""


def told(prompt: ChatPrompt) -> str:
    """A chat as a template sees it, the order of members included."""
    messages = [dict(sorted(message.items())) for message in prompt.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return json.dumps([messages, prompt.tools], indent=1)


async def test_a_conversation_is_the_same_prompt(connect: Any) -> None:
    engine = FakeEngine("ok")
    client = connect(engine, **PARSERS)
    for dialect in URLS:
        await ask(client, dialect, **TALKS[dialect])
    chat, *others = (told(request.prompt) for request in engine.requests)  # type: ignore[arg-type]
    for other in others:
        assert other == chat
