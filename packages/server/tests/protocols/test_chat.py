"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from headrace_core.text import AnswerContext, ParsedDelta, ReasoningParser
from headrace_server.parsing.registry import Parsers
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


async def post(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(client: Any, **body: Any) -> Any:
    answer = await client.post(URL, json={"messages": HI, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


async def streamed(client: Any, events: Any, **body: Any) -> list[Any]:
    answer = await client.post(URL, json={"messages": HI, "stream": True, **body})
    assert answer.status_code == 200, answer.text
    found: list[Any] = events(answer.text)
    return found


async def test_the_answer_has_every_field(connect: Any) -> None:
    answer = await post(connect(FakeEngine("Hello.")), model="fake-model")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant", "content": "Hello.", "refusal": None, "annotations": None,
        "audio": None, "function_call": None, "reasoning": None,
        "reasoning_content": None,
    }  # fmt: skip
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "stop", None)
    assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.req("REL-16")
async def test_streams_equal_the_whole(connect: Any, events: Any) -> None:
    engine = FakeEngine(lambda text, index: f"größe 東京 {index}", tokens_per_output=2)
    client = connect(engine)
    body = {"n": 2, "logprobs": True, "top_logprobs": 2}
    whole = await post(client, **body)
    chunks = await streamed(client, events, **body, stream_options={})
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for k in chunks for c in k["choices"] if c["index"] == choice["index"]]
        assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert text == choice["message"]["content"]
        assert [c["finish_reason"] for c in mine][-1] == "stop"
        tokens = [t for c in mine if c["logprobs"] for t in c["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]


async def test_logprobs(connect: Any) -> None:
    client = connect(FakeEngine("é"))
    answer = await post(client, logprobs=True, top_logprobs=2)
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert first["token"] == "é"
    assert first["bytes"] == list("é".encode())
    assert [t["logprob"] for t in first["top_logprobs"]] == [-0.5, -1.5]
    answer = await post(client, logprobs=True)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert (await refused(client, top_logprobs=2))["param"] == "top_logprobs"
    assert (await refused(client, logprobs=True, top_logprobs=21))["param"] == "top_logprobs"
    assert (await refused(client, logprobs=True, top_logprobs=-1))["param"] == "top_logprobs"


async def test_max_completion_tokens_wins(connect: Any) -> None:
    engine = FakeEngine("x" * 90)
    client = connect(engine)
    for body, limit in (({}, None), ({"max_tokens": 7}, 7),
                        ({"max_tokens": 7, "max_completion_tokens": 9}, 9)):  # fmt: skip
        await post(client, **body)
        assert engine.requests[-1].params.max_tokens == limit
    assert (await refused(client, max_tokens=0))["param"] == "max_tokens"


async def test_stop(connect: Any, events: Any) -> None:
    client = connect(FakeEngine("word"))
    (choice,) = (await post(client, stop=["r"]))["choices"]
    assert (choice["message"]["content"], choice["stop_reason"]) == ("wo", "r")
    chunks = await streamed(client, events, stop=["r"])
    assert chunks[-1]["choices"][0]["stop_reason"] == "r"


async def test_content_forms(connect: Any) -> None:
    engine = FakeEngine("x")
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": ["a", {"type": "text", "text": "b"},
                                     {"type": "input_text", "text": "c"}, {"text": "d"},
                                     {"type": "refusal", "refusal": "e"},
                                     {"type": "thinking", "thinking": "f", "closed": True}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3", "weight": 2},
        {"role": "narrator", "content": "n", "reasoning": "because", "name": "N"},
    ]  # fmt: skip
    await post(connect(engine), messages=messages)
    prompt: Any = engine.requests[0].prompt
    assert prompt.messages[1]["content"] == [{"type": "text", "text": t} for t in "abcdef"]
    call = prompt.messages[2]
    assert call["content"] is None
    assert call["tool_calls"] == messages[2]["tool_calls"]
    assert prompt.messages[3] == {
        "role": "tool", "tool_call_id": "1", "content": "3", "weight": 2,
    }  # fmt: skip
    assert prompt.messages[4]["reasoning_content"] == "because"
    assert prompt.messages[4]["name"] == "N"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
        {"image_url": "http://x/"},
        {"type": "input_audio", "input_audio": {}},
        {"type": "video_url", "video_url": ""},
        {"type": "hologram"},
        {"type": ["text"]},
        {},
        {"type": "text"},
        {"type": "text", "text": 3},
    ],
)
async def test_other_parts_are_refused(connect: Any, part: Any) -> None:
    engine = FakeEngine("x")
    error = await refused(connect(engine), messages=[{"role": "user", "content": [part]}])
    assert error["param"].startswith("messages[0].content[0]")
    assert "messages[0].content[0]" in error["message"]
    assert engine.requests == []


async def test_continuing_the_last_message(connect: Any, events: Any) -> None:
    engine = FakeEngine(" more")
    client = connect(engine)
    messages = [*HI, {"role": "narrator", "content": "once"}]
    answer = await post(client, messages=messages, continue_final_message=True, echo=True)
    assert answer["choices"][0]["message"]["role"] == "narrator"
    assert answer["choices"][0]["message"]["content"] == "once more"
    assert engine.requests[0].prompt_text.endswith("<narrator>once")
    chunks = await streamed(
        client, events, messages=messages, continue_final_message=True, echo=True
    )
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "once more"
    error = await refused(client, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


async def test_echo_needs_the_answering_role(connect: Any) -> None:
    answer = await post(connect(FakeEngine("x")), echo=True)
    assert answer["choices"][0]["message"]["content"] == "x"


async def test_response_role(connect: Any) -> None:
    answer = await post(connect(FakeEngine("x"), response_role="oracle"))
    assert answer["choices"][0]["message"]["role"] == "oracle"


async def test_templates_need_trust(connect: Any) -> None:
    error = await refused(connect(), chat_template="{{ messages }}")
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    error = await refused(connect(), chat_template_kwargs={"chat_template": "{{ 1 }}"})
    assert error["param"] == "chat_template_kwargs"
    engine = FakeEngine("x")
    client = connect(engine, trust_request_chat_template=True, chat_template="{{ server }}")
    await post(client, chat_template="{{ mine }}", chat_template_kwargs={"deep": True})
    await post(client)
    first, second = (r.prompt for r in engine.requests)
    assert first.chat_template == "{{ mine }}"  # type: ignore[union-attr]
    assert first.chat_template_kwargs == {"deep": True}  # type: ignore[union-attr]
    assert second.chat_template is None, "the engine has the operator's"  # type: ignore[union-attr]


async def test_default_template_kwargs(connect: Any) -> None:
    engine = FakeEngine("x")
    client = connect(engine, default_chat_template_kwargs={"deep": True, "wide": 1})
    await post(client, chat_template_kwargs={"deep": False})
    prompt: Any = engine.requests[0].prompt
    assert prompt.chat_template_kwargs == {"deep": False, "wide": 1}


async def test_return_token_ids(connect: Any, events: Any) -> None:
    client = connect(FakeEngine("xy"))
    answer = await post(client, return_token_ids=True, prompt_logprobs=1)
    assert answer["choices"][0]["token_ids"][:2] == [120, 121]
    assert answer["prompt_token_ids"][0] == ord("<")
    assert answer["prompt_logprobs"][0] is None
    chunks = await streamed(client, events, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    ids = [t for c in chunks for t in c["choices"][0].get("token_ids", [])]
    assert ids == answer["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", 3),
        ("mm_processor_kwargs", {"a": 1}),
        ("logits_processors", []),
        ("reasoning_effort", "utmost"),
        ("thinking_token_budget", 10),
        ("functions", []),
        ("modalities", ["text", "audio"]),
        ("best_of", 2),
        ("length_penalty", 0.5),
    ],
)
async def test_fields_that_cannot_be_honoured(connect: Any, field: str, value: Any) -> None:
    engine = FakeEngine("x")
    error = await refused(connect(engine), **{field: value})
    assert error["param"] == field
    assert engine.requests == []


async def test_values_that_ask_for_nothing_are_accepted(connect: Any) -> None:
    await post(
        connect(),
        response_format={"type": "text"}, use_beam_search=False, length_penalty=1.0,
        modalities=["text"], store=False, tools=[], tool_choice="none", reasoning_effort=None,
        structured_outputs=None, stop=None, logit_bias=None, service_tier="auto",
    )  # fmt: skip


async def test_tools_need_a_parser(connect: Any) -> None:
    client = connect(FakeEngine("x"))
    error = await refused(client, tools=TOOLS)
    assert error["param"] == "tools"
    assert "--tool-call-parser" in error["message"]
    engine = FakeEngine("x")
    await post(connect(engine), tools=TOOLS, tool_choice="none")
    assert engine.requests[0].prompt.tools == TOOLS  # type: ignore[union-attr]
    client = connect(engine, exclude_tools_when_tool_choice_none=True)
    await post(client, tools=TOOLS, tool_choice="none")
    assert engine.requests[1].prompt.tools is None  # type: ignore[union-attr]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ON = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


async def test_tool_calls(connect: Any, events: Any) -> None:
    client = connect(FakeEngine(f"See: {CALL}\n{CALL}", tokens_per_output=5), **ON)
    answer = await post(client, tools=TOOLS)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "See:"
    calls = choice["message"]["tool_calls"]
    assert [c["function"] for c in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({c["id"] for c in calls}) == 2
    assert all(c["id"].startswith("chatcmpl-tool-") and c["type"] == "function" for c in calls)
    chunks = await streamed(client, events, tools=TOOLS)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content", "") for d in deltas) == "See:"
    pieces = [call for d in deltas for call in d.get("tool_calls", [])]
    for index in (0, 1):
        mine = [p["function"] for p in pieces if p["index"] == index]
        assert [f.get("name") for f in mine] == ["add"] + [None] * (len(mine) - 1)
        assert json.loads("".join(f.get("arguments", "") for f in mine)) == {"a": 1}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_only(connect: Any) -> None:
    client = connect(FakeEngine(CALL * 3), **ON)
    answer = await post(client, tools=TOOLS, parallel_tool_calls=False)
    message = answer["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
async def test_reasoning_effort_reaches_the_template(connect: Any, effort: str) -> None:
    engine = FakeEngine("x")
    client = connect(engine, default_chat_template_kwargs={"reasoning_effort": "x", "wide": 1})
    await post(client, reasoning_effort=effort)
    off = {"enable_thinking": False, "thinking": False} if effort == "none" else {}
    prompt: Any = engine.requests[0].prompt
    assert prompt.chat_template_kwargs == {"wide": 1, "reasoning_effort": effort, **off}
    await post(client, reasoning_effort=effort, chat_template_kwargs={"reasoning_effort": "mine"})
    prompt = engine.requests[1].prompt
    assert prompt.chat_template_kwargs["reasoning_effort"] == "mine"


async def test_a_budget_for_reasoning(connect: Any) -> None:
    engine = FakeEngine("x")
    await post(connect(engine, reasoning_parser="qwen3"), thinking_token_budget=7)
    assert engine.requests[0].params.thinking_token_budget == 7
    error = await refused(connect(engine), thinking_token_budget=7)
    assert "--reasoning-parser" in error["message"]


class Witness(ReasoningParser):
    """Shows what it was told."""

    end_marker = "!"
    seen: ClassVar[list[AnswerContext]] = []

    def feed(self, text: str) -> ParsedDelta:
        return ParsedDelta(text)

    def finish(self) -> ParsedDelta:
        self.seen.append(self.context)
        return ParsedDelta()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("cut", [None, 4])
async def test_reasoning_parsers_see_the_prompts_end(
    connect: Any, monkeypatch: pytest.MonkeyPatch, stream: bool, cut: int | None
) -> None:
    """A template may have opened the reasoning already."""

    class NoText(FakeEngine):
        """Gives no prompt text, as engines do where the prompt was cut."""

        async def _play(self, *args: Any) -> Any:
            async for output in super()._play(*args):
                output.prompt = None if cut else output.prompt
                yield output

    monkeypatch.setattr(Witness, "seen", [])
    client = connect(
        NoText("x"), default_chat_template_kwargs={"deep": 1}, reasoning_parser="qwen3"
    )
    client._transport.app.state.headrace.parsers = Parsers(None, Witness)
    messages = [{"role": "user", "content": "Hi " * 200}]
    body = {"messages": messages, "stream": stream, "chat_template_kwargs": {"on": True}, "n": 2}
    assert (await client.post(URL, json=body)).status_code == 200
    first, second = Witness.seen
    assert first == second
    assert first.prompt_end == "<user>".join(["", "Hi " * 200 + "</user><assistant>"])[-256:]
    assert first.chat_template_kwargs == {"deep": 1, "on": True}


async def test_reasoning(connect: Any, events: Any) -> None:
    text = f"<think>why</think>so{CALL}"
    client = connect(FakeEngine(text, tokens_per_output=3), reasoning_parser="qwen3", **ON)
    message = (await post(client, tools=TOOLS))["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("why", "why")
    assert message["content"] == "so"
    assert len(message["tool_calls"]) == 1
    deltas = [c["choices"][0]["delta"] for c in await streamed(client, events, tools=TOOLS)]
    assert "".join(d.get("reasoning", "") for d in deltas) == "why"
    assert "".join(d.get("content", "") for d in deltas) == "so"
    message = (await post(client, include_reasoning=False))["choices"][0]["message"]
    assert message["reasoning"] is None
    assert message["content"] == f"so{CALL}"


async def test_calls_are_not_sought_in_reasoning(connect: Any) -> None:
    text = f"<think>{CALL}</think>so"
    client = connect(FakeEngine(text), reasoning_parser="qwen3", **ON)
    message = (await post(client, tools=TOOLS))["choices"][0]["message"]
    assert (message["content"], message.get("tool_calls")) == ("so", None)
    assert message["reasoning"] == CALL


async def test_a_model_without_template(connect: Any) -> None:
    engine = FakeEngine(model=fake_served_model(has_chat_template=False))
    error = await refused(connect(engine))
    assert "chat" in error["message"]
    await post(connect(engine, chat_template="{{ messages }}"))


async def test_parts_with_audio_reach_models_that_take_it(connect: Any) -> None:
    long = "A" * 400_000
    parts = [
        {"type": "text", "text": "hear"},
        {"type": "input_audio", "input_audio": {"data": long, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}},
    ]
    messages = [{"role": "user", "content": parts}]
    engine = FakeEngine("x", model=fake_served_model(modalities=("audio",)))
    await post(connect(engine), messages=messages)
    assert engine.requests[0].prompt.messages == messages
    error = await refused(connect(FakeEngine("x")), messages=messages)
    assert "'input_audio' are not supported; this model takes text only" in error["message"]
