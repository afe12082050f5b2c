"""Answers that must call: in the model's own format, whole or cut, on every route."""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core import plugins
from headrace_core.errors import RequestError
from headrace_core.text import AnswerContext
from headrace_server.chat.answer_plan import serves_tags
from headrace_server.chat.segments import CallPiece, Content
from headrace_server.chat.tool_choice import MAX_FORCED_CALLS, calls_schema, plan_tools
from headrace_server.parsing.answer_parser import AnswerParser
from headrace_server.reasoning_parsers.formats.minimax_m2_append_think import (
    MiniMaxM2AppendThinkReasoningParser,
)
from headrace_server.tool_parsers.forced import ForcedToolCallParser
from headrace_server.tool_parsers.formats.glm45 import Glm45ToolParser
from headrace_server.tool_parsers.formats.hermes import HermesToolParser
from headrace_server.tool_parsers.formats.qwen3_xml import Qwen3XmlToolParser
from headrace_testing.fakes.engine import FakeEngine, fake_served_model

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
FIRST, SECOND = '{"city": "Oslo", "days": 2}', '{"city": "New York"}'

TEXTS = {
    "hermes": (
        f'<tool_call>\n{{"name": "weather", "arguments": {FIRST}}}\n</tool_call>\n',
        f'<tool_call>\n{{"name": "weather", "arguments": {SECOND}}}\n</tool_call>',
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "weather", "arguments": {FIRST}}}, ',
        f'{{"name": "weather", "arguments": {SECOND}}}]',
    ),
    "llama3_json": (
        f'{{"name": "weather", "parameters": {FIRST}}}; ',
        f'{{"name": "weather", "parameters": {SECOND}}}',
    ),
    "xlam": (
        f'[{{"name": "weather", "arguments": {FIRST}}}, ',
        f'{{"name": "weather", "arguments": {SECOND}}}]',
    ),
    "gigachat3": (
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {FIRST}}}',
        f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "weather", "arguments": {SECOND}}}',
    ),
    "mistral": (f"[TOOL_CALLS]weather[ARGS]{FIRST}", f"[TOOL_CALLS]weather[ARGS]{SECOND}"),
    "deepseek_v3": (
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
            f"```json\n{FIRST}\n```<｜tool▁call▁end｜>\n"
        ),
        (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{SECOND}\n```"
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ),
    "kimi_k2": (
        (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            f"<|tool_call_argument_begin|>{FIRST}<|tool_call_end|>"
        ),
        (
            f"<|tool_call_begin|>functions.weather:1<|tool_call_argument_begin|>{SECOND}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        ),
    ),
    "qwen3_coder": (
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n"
        ),
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
    ),
    "glm45": (
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        ),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>New York</arg_value>\n</tool_call>",
    ),
    "pythonic": ("[weather(city='Oslo', days=2), ", "weather(city='New York')]"),
    "olmo3": (
        '<function_calls>weather(city="Oslo", days=2)\n',
        'weather(city="New York")</function_calls>',
    ),
}
"""Parser -> two calls, as its models write them: the first, and the rest."""


class Said(NamedTuple):
    """An answer as a client gets it."""

    calls: list[tuple[str, str]]
    """Name and arguments."""
    content: str
    reason: str
    statuses: list[str]
    """Statuses of the calls, where the protocol has them."""


class Wire:
    """A client of one application; asks every route, streamed and whole."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def _post(self, url: str, body: Any) -> Any:
        answer = await self._client.post(url, json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def chat(self, choice: Any, **body: Any) -> Said:
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER, NOW],
                "tool_choice": choice, **body}  # fmt: skip
        whole = (await self._post("/v1/chat/completions", body)).json()["choices"][0]
        calls = [c["function"] for c in whole["message"].get("tool_calls", [])]
        said = Said(
            [(c["name"], c["arguments"]) for c in calls],
            whole["message"]["content"] or "", whole["finish_reason"], [],
        )  # fmt: skip
        found: list[list[str]] = []
        content, reason = "", ""
        for event in _data(await self._post("/v1/chat/completions", {**body, "stream": True})):
            for part in event["choices"]:
                content += part["delta"].get("content") or ""
                reason = part["finish_reason"] or reason
                for piece in part["delta"].get("tool_calls", []):
                    if "name" in piece["function"]:
                        found.append([piece["function"]["name"], ""])
                    found[piece["index"]][1] += piece["function"].get("arguments", "")
        assert ([tuple(call) for call in found], content, reason) == said[:3]
        return said

    async def responses(self, choice: Any, **body: Any) -> Said:
        tools = [{"type": "function", **tool["function"]} for tool in (WEATHER, NOW)]  # type: ignore[dict-item]
        if isinstance(choice, dict):
            choice = {"type": "function", "name": choice["function"]["name"]}
        limit = {"max_output_tokens": body.pop("max_tokens")} if "max_tokens" in body else {}
        body = {"input": "Hi", "tools": tools, "tool_choice": choice, **limit, **body}
        whole = (await self._post("/v1/responses", body)).json()
        streamed = _data(await self._post("/v1/responses", {**body, "stream": True}))
        last = streamed[-1]["response"]
        said, again = self._response(whole), self._response(last)
        assert said == again
        deltas = [e["delta"] for e in streamed if e["type"].endswith("arguments.delta")]
        assert "".join(deltas) == "".join(arguments for _, arguments in said.calls)
        return said

    def _response(self, found: Any) -> Said:
        calls = [item for item in found["output"] if item["type"] == "function_call"]
        texts = [item for item in found["output"] if item["type"] == "message"]
        return Said(
            [(c["name"], c["arguments"]) for c in calls],
            "".join(part["text"] for item in texts for part in item["content"]),
            found["status"], [c["status"] for c in calls],
        )  # fmt: skip

    async def messages(self, choice: Any, **body: Any) -> Said:
        tools = [
            {"name": "weather", "input_schema": SCHEMA},
            {"name": "now", "input_schema": {"type": "object"}},
        ]
        kinds = {"required": {"type": "any"}, "auto": {"type": "auto"}}
        if "stop" in body:
            body["stop_sequences"] = body.pop("stop")
        body = {
            "model": "fake-model", "max_tokens": 1000, "tools": tools,
            "messages": [{"role": "user", "content": "Hi"}],
            "tool_choice": kinds[choice] if isinstance(choice, str)
            else {"type": "tool", "name": choice["function"]["name"]}, **body,
        }  # fmt: skip
        whole = (await self._post("/v1/messages", body)).json()
        blocks: list[Any] = []
        reason = ""
        for event in _data(await self._post("/v1/messages", {**body, "stream": True})):
            if event["type"] == "content_block_start":
                blocks.append([event["content_block"], ""])
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[event["index"]][1] += delta.get("partial_json", "") + delta.get("text", "")
            elif event["type"] == "message_delta":
                reason = event["delta"]["stop_reason"]
        assert reason == whole["stop_reason"]
        assert [b["type"] for b in whole["content"]] == [block["type"] for block, _ in blocks]
        return Said(
            [(b["name"], text) for b, text in blocks if b["type"] == "tool_use"],
            "".join(text for b, text in blocks if b["type"] == "text"), reason, [],
        )  # fmt: skip


def _data(answer: Any) -> list[Any]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def wire(connect: Any, text: str, parser: str = "hermes", **settings: Any) -> Any:
    engine = FakeEngine(text, tokens_per_output=7)
    client = connect(engine, enable_auto_tool_choice=True, tool_call_parser=parser, **settings)
    return engine, Wire(client)


def same(found: list[tuple[str, str]], expected: list[tuple[str, str]]) -> bool:
    """True if calls are the same JSON."""
    return [(n, json.loads(a)) for n, a in found] == [(n, json.loads(a)) for n, a in expected]


BOTH = [("weather", FIRST), ("weather", SECOND)]


@pytest.mark.parametrize("parser", TEXTS)
async def test_a_required_call_in_the_models_own_format(connect: Any, parser: str) -> None:
    engine, client = wire(connect, "".join(TEXTS[parser]), parser)
    for ask, reason in ((client.chat, "tool_calls"), (client.responses, "completed"),
                        (client.messages, "tool_use")):  # fmt: skip
        said = await ask("required")
        assert same(said.calls, BOTH)
        assert (said.content, said.reason) == ("", reason)
        params = engine.requests[-1].params
        assert params.structured_outputs.structural_tag is not None
        assert params.structured_outputs.json is None


@pytest.mark.keep(5, every_value=False)
@pytest.mark.parametrize("parser", TEXTS)
async def test_what_is_cut_never_becomes_content(connect: Any, parser: str) -> None:
    """Wherever the output ends: complete calls are there, and nothing of the rest but arguments."""
    first, rest = TEXTS[parser]
    size = len(first + rest)
    _, client = wire(connect, first + rest, parser)
    for limit in [*range(1, len(first), 11), *range(len(first), size, 5)]:
        said = await client.chat("required", max_tokens=limit)
        assert (said.content, said.reason) == ("", "length"), limit
        assert [name for name, _ in said.calls] in ([], ["weather"], ["weather"] * 2)
        if limit >= len(first):
            assert same(said.calls[:1], BOTH[:1]), limit
    for limit in (3, len(first) - 1, len(first) + 3, size - 3):
        cut = await client.chat("required", max_tokens=limit)
        for ask, reason in ((client.responses, "incomplete"), (client.messages, "max_tokens")):
            said = await ask("required", max_tokens=limit)
            assert (said.calls, said.content, said.reason) == (cut.calls, "", reason)
        for _, arguments in cut.calls[:-1]:
            json.loads(arguments)


@pytest.mark.keep(5, every_value=False)
@pytest.mark.parametrize("parser", TEXTS)
async def test_free_calls_that_are_cut_leave_no_half_tags(connect: Any, parser: str) -> None:
    first, rest = TEXTS[parser]
    _, client = wire(connect, first + rest, parser)
    for limit in range(len(first), len(first + rest), 9):
        for ask in (client.chat, client.messages):
            said = await ask("auto", max_tokens=limit)
            assert said.content == "", limit
            assert same(said.calls[:1], BOTH[:1])


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_stop_string_within_a_call(connect: Any, choice: str) -> None:
    first, rest = TEXTS["hermes"]
    _, client = wire(connect, first + rest)
    within = [("weather", FIRST), ("weather", '{"city": "New ')]
    said = await client.chat(choice, stop=["York"])
    assert (said.calls, said.content, said.reason) == (within, "", "stop")
    said = await client.messages(choice, stop=["York"])
    assert (said.calls, said.content, said.reason) == (within, "", "stop_sequence")
    said = await client.responses(choice, stop=["York"])
    assert (said.calls, said.content, said.reason) == (within, "", "completed")
    assert said.statuses == ["completed", "incomplete"]


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_stop_string_in_the_head_of_a_call(connect: Any, choice: str) -> None:
    """The complete call before it is delivered; the head is dropped."""
    first, rest = TEXTS["hermes"]
    _, client = wire(connect, first + rest.replace("weather", "now"))
    for ask, reason in ((client.chat, "stop"), (client.messages, "stop_sequence"),
                        (client.responses, "completed")):  # fmt: skip
        said = await ask(choice, stop=['now"'])
        assert (said.calls, said.content, said.reason) == (BOTH[:1], "", reason)
        assert set(said.statuses) <= {"completed"}


@pytest.mark.parametrize("choice", ["required", "auto"])
async def test_a_stop_string_behind_a_call(connect: Any, choice: str) -> None:
    """Agents stop at the closing tag: the call is complete."""
    first, rest = TEXTS["hermes"]
    _, client = wire(connect, first + rest)
    for stop in (["</tool_call>"], ["\n<tool_call>"]):
        said = await client.chat(choice, stop=stop)
        assert (said.calls, said.content, said.reason) == (BOTH[:1], "", "tool_calls")


async def test_a_complete_call_is_not_incomplete_because_another_was_cut(connect: Any) -> None:
    first, rest = TEXTS["hermes"]
    _, client = wire(connect, first + rest)
    said = await client.responses("required", max_tokens=len(first) + 12)
    assert (said.calls, said.reason, said.statuses) == (BOTH[:1], "incomplete", ["completed"])
    said = await client.responses("required", max_tokens=len(first + rest) - 20)
    assert said.statuses == ["completed", "incomplete"]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "pythonic"])
async def test_one_named_call(connect: Any, parser: str) -> None:
    engine, client = wire(connect, TEXTS[parser][0].rstrip(", "), parser)
    text = TEXTS[parser][0].rstrip(", ") + ("]" if parser == "pythonic" else "")
    engine.reply = text
    for ask, reason in ((client.chat, "stop"), (client.responses, "completed"),
                        (client.messages, "tool_use")):  # fmt: skip
        said = await ask(NAMED)
        assert same(said.calls, BOTH[:1])
        assert (said.content, said.reason) == ("", reason)
    form = engine.requests[-1].params.structured_outputs.structural_tag
    assert '"repeat"' not in json.dumps(form)
    assert "now" not in json.dumps(form)


async def test_forced_calls_come_after_the_reasoning(connect: Any) -> None:
    text = "<think>[why]</think>\n\n" + "".join(TEXTS["hermes"])
    _, client = wire(connect, text, reasoning_parser="qwen3")
    for ask in (client.chat, client.responses, client.messages):
        said = await ask("required")
        assert (said.calls, said.content) == (BOTH, "")


def form_of(plan: Any) -> str:
    return json.dumps(plan.constraint.structural_tag)


def test_the_number_of_calls() -> None:
    many = plan_tools([WEATHER], "required", HermesToolParser)
    assert f'"max": {MAX_FORCED_CALLS}' in form_of(many)
    one = plan_tools([WEATHER], "required", HermesToolParser, parallel=False)
    assert "repeat" not in form_of(one)
    assert (one.bare, one.needs_special_tokens, one.forced) == (False, True, True)
    for parallel, most in ((True, MAX_FORCED_CALLS), (False, 1)):
        plain = plan_tools([WEATHER], "required", None, parallel=parallel)
        assert plain.constraint is not None
        schema: Any = plain.constraint.json
        assert (schema["minItems"], schema["maxItems"]) == (1, most)


def test_json_where_the_format_cannot_write_a_call() -> None:
    def tool(parameters: Any, name: str = "f") -> Any:
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    pattern = tool({"properties": {"a": {"type": "string", "pattern": "x"}}})
    anything = tool({"type": "object", "additionalProperties": True})
    for parser, one in (
        (None, WEATHER),
        (Glm45ToolParser, pattern),
        (Qwen3XmlToolParser, anything),
    ):
        plan = plan_tools([one, NOW], "required", parser)
        assert plan.bare
        assert plan.constraint is not None
        assert plan.constraint.json == calls_schema([one, NOW])
        named = {"type": "function", "function": {"name": one["function"]["name"]}}
        assert plan_tools([one, NOW], named, parser).bare
    assert plan_tools([WEATHER], "required", HermesToolParser, forces_own=False).bare
    assert not plan_tools([pattern], "required", HermesToolParser).bare


@pytest.mark.parametrize("name", plugins.installed("headrace.tool_parsers"))
@pytest.mark.parametrize("required", [[], ["p3"]])
def test_a_form_is_not_much_longer_than_its_schemas(name: str, required: list[str]) -> None:
    """Forty parameters that may be left out, in formats that write each of them by itself."""
    properties = {f"p{i}": {"type": "integer", "enum": [i]} for i in range(40)}
    schema = {"type": "object", "properties": properties, "required": required}
    parser = plugins.load("headrace.tool_parsers", name)
    form = parser.forced_structural_tag({"f": schema}, most=16)
    assert len(json.dumps(form)) < 16 * len(json.dumps(schema))


def test_calls_that_would_need_too_long_a_form_are_json() -> None:
    wide = {f"p{i}": {"type": "string", "enum": ["x" * 2000]} for i in range(300)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": wide}}}
    assert plan_tools([tool], "required", Qwen3XmlToolParser).bare is False
    assert plan_tools([tool], "required", plugins.load("headrace.tool_parsers", "pythonic")).bare


class _State:
    """The part of the server's state that the decision needs."""

    def __init__(self, **grammars: Any) -> None:
        self.engine = self
        self.settings = {"structured_outputs": grammars} if grammars else {}


@pytest.mark.skipif(
    "outlines" not in plugins.installed("headrace.grammar_backends"),
    reason="the engine's grammar backends are not installed",
)
def test_json_where_the_backend_cannot_hold_the_format() -> None:
    def serves(**grammars: Any) -> bool:
        return serves_tags(_State(**grammars))  # type: ignore[arg-type]

    assert serves()
    assert serves(backend="outlines", disable_fallback=False)
    assert not serves(backend="outlines", disable_fallback=True)
    assert not serves(backend="lm-format-enforcer", disable_fallback=True)
    assert serves(backend="guidance", disable_fallback=True)
    assert serves(backend="auto", disable_fallback=True)


CALL = f" to=functions.weather <|constrain|>json<|message|>{FIRST}<|call|>"
HARMONY = f"<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary{CALL}"


@pytest.mark.parametrize("architecture", ["GptOssForCausalLM", "FakeForCausalLM"])
@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_gpt_oss_calls_behind_its_thoughts(
    connect: Any, choice: Any, architecture: str
) -> None:
    """The form describes the thoughts, too: it holds from the first token on."""
    model = fake_served_model(architecture=architecture)
    engine = FakeEngine(HARMONY, model=model, tokens_per_output=7)
    client = Wire(
        connect(engine, enable_auto_tool_choice=True, tool_call_parser="openai",
                reasoning_parser="openai_gptoss")
    )  # fmt: skip
    for ask in (client.chat, client.responses, client.messages):
        said = await ask(choice)
        assert same(said.calls, BOTH[:1])
        assert said.content == ""
        held = engine.requests[-1].params.structured_outputs
        assert held.enable_in_reasoning
        form = json.dumps(held.structural_tag)
        assert "<|channel|>analysis<|message|>" in form
        assert "to=functions.weather" in form
        assert ("to=functions.now" in form) is (choice == "required")


async def test_the_constraint_waits_for_the_reasoning_of_other_formats(connect: Any) -> None:
    async def held(parser: str, reasoning: str | None, reply: str) -> Any:
        engine, client = wire(connect, reply, parser, reasoning_parser=reasoning)
        await client.chat("required")
        return engine.requests[-1].params.structured_outputs

    first = TEXTS["hermes"][0]
    assert not (await held("hermes", "qwen3", first)).enable_in_reasoning
    assert not (await held("hermes", None, first)).enable_in_reasoning
    assert not (
        await held("openai", "qwen3", f"</think><|channel|>commentary{CALL}")
    ).enable_in_reasoning
    granite = await held("granite", "granite", "".join(TEXTS["granite"]))
    assert granite.enable_in_reasoning, "nothing marks where its reasoning ends"
    bare = await held("hermes", "openai_gptoss", '[{"name": "weather", "parameters": {}}]')
    assert (bare.json is None, bare.structural_tag, bare.enable_in_reasoning) == (
        False,
        None,
        False,
    )


ODD = st.recursive(
    st.sampled_from([None, True, 3, -1, "x", "", "string", [], {}, "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "required", "anyOf", "$ref", "$defs", "enum", "const",
                 "minLength", "maxLength", "additionalProperties", "a", "items"]
            ), inner, max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from(["properties", "required", "$defs", "type"]), ODD))
def test_no_schema_is_too_odd(schema: Any) -> None:
    """A parser writes a form for it, or refuses; the engine says what is wrong with it."""
    for entry in plugins.installed("headrace.tool_parsers").values():
        parser = entry.load()
        for make in (
            lambda parser=parser: parser.forced_structural_tag({"f": schema}, most=2),
            lambda parser=parser: parser.strict_structural_tag({"f": schema}),
        ):
            with contextlib.suppress(RequestError):
                json.dumps(make())


@pytest.mark.parametrize("cut", [1, 2, 3, 5, 8, 1000])
def test_thoughts_that_stay_in_the_content_are_kept(cut: int) -> None:
    """Whatever they say, and however the text is cut; calls are sought behind their end."""
    draft = 'so [{"name": "weather", "parameters": {}}] </thin</thi'
    calls = f'[{{"name": "weather", "parameters": {FIRST}}}]'
    for text, content, called in (
        (f"{draft}</think>\n\n{calls}", f"<think>{draft}</think>", True),
        (draft, f"<think>{draft}", False),
        (f"{draft}</think>", f"<think>{draft}</think>", False),
    ):
        tools = ForcedToolCallParser([WEATHER])
        parser = AnswerParser(MiniMaxM2AppendThinkReasoningParser(), tools, only_calls=True)
        said, arguments = "", ""
        pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
        for index, piece in enumerate(pieces):
            for segment in parser.feed(piece, last=index == len(pieces) - 1):
                said += segment.text if isinstance(segment, Content) else ""
                arguments += segment.arguments if isinstance(segment, CallPiece) else ""
        assert (said, arguments, parser.called) == (content, FIRST if called else "", called)


def test_a_thought_that_the_prompt_has_ended_is_not_sought() -> None:
    context = AnswerContext("<think>\n\n</think>\n\n")
    reasoning = MiniMaxM2AppendThinkReasoningParser(context)
    parser = AnswerParser(reasoning, ForcedToolCallParser([WEATHER]), only_calls=True)
    first, *rest = parser.feed(f'[{{"name": "weather", "parameters": {FIRST}}}]', last=True)
    assert isinstance(first, CallPiece)
    assert first.name == "weather"
    assert not any(isinstance(segment, Content) for segment in rest)
