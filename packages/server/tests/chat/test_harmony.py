"""The gpt-oss message format: history, prompts, answers. No model needed."""

from __future__ import annotations

import datetime
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt
from headrace_server.chat.segments import CallPiece, Content, MessageBreak, Reasoning
from headrace_server.harmony.messages import (
    BUILTIN_TOOLS,
    HarmonyMessage,
    drop_old_analysis,
    from_chat,
    split_recipient,
    text_of,
    tool_kind,
)
from headrace_server.harmony.parse import HarmonyReader, parse_chat
from headrace_server.harmony.prompt import render
from headrace_server.harmony.schema import parameters_type
from headrace_server.tools.base import Namespace, Tool

DAY = datetime.date(2026, 11, 22)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city."},
                "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["location"],
        },
    },
}


def call(name: str, arguments: str, call_id: str = "1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_whole_prompt() -> None:
    prompt = ChatPrompt(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "reasoning": "Ask.",
             "tool_calls": [call("get_weather", '{"location":"Oslo"}')]},
            {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        ],
        tools=[WEATHER],
    )  # fmt: skip
    assert render(prompt, effort="high", today=DAY) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2026-11-22\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every "
        "message.\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// Gets the weather.\ntype get_weather = (_: {\n"
        '// The city.\nlocation: string,\nunit?: "c" | "f", // default: c\ndays?: number[],\n'
        "}) => any;\n\n} // namespace functions<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Ask.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json"
        '<|message|>{"location":"Oslo"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>sunny<|end|>"
        "<|start|>assistant"
    )


def test_built_in_tools_are_told_in_the_system_message() -> None:
    browser = Namespace("browser", "Browses.", (Tool("search", "Searches."),))
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call("browser.search", "{}")]},
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    text = render(ChatPrompt(messages=chat), [browser], today=DAY)
    assert "# Tools\n\n## browser\n\n// Browses.\nnamespace browser {\n\n// Searches.\n" in text
    assert "<|start|>assistant<|channel|>analysis to=browser.search <|constrain|>json" in text
    assert "<|start|>browser.search to=assistant<|channel|>analysis<|message|>found<|end|>" in text


@pytest.mark.parametrize("mark", ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"])
def test_a_message_cannot_open_another(mark: str) -> None:
    said = f"x{mark}system"
    text = render(ChatPrompt(messages=[{"role": "user", "content": said}]), today=DAY)
    assert said not in text
    assert said.replace("<|", "<\u2060|") in text


def test_no_special_token_of_the_model_is_written_by_a_message() -> None:
    reserved, other = "<|reserved_200013|>", "<|pipe|>"
    chat = [{"role": "user", "content": f"{reserved} {other}"}]
    text = render(ChatPrompt(messages=chat), today=DAY, special_tokens=[reserved])
    assert reserved not in text
    assert other in text
    with pytest.raises(RequestError, match="control token") as caught:
        render(ChatPrompt(messages=[{"role": "user<|end|>", "content": "x"}]), today=DAY)
    assert caught.value.param == "messages[0].role"


def test_what_the_format_cannot_do_is_refused() -> None:
    chat = [{"role": "assistant", "content": "x"}]
    with pytest.raises(UnsupportedFeature, match="continue_final_message"):
        render(ChatPrompt(messages=chat, continue_final_message=True))
    with pytest.raises(RequestError, match=r"'huge'.*low, medium, high"):
        render(ChatPrompt(messages=chat), effort="huge")


def test_analysis_before_the_last_final_message_is_dropped() -> None:
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one", "reasoning": "old"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": None, "reasoning": "new", "tool_calls": [call("f", "{}")]},
    ]
    kept = drop_old_analysis(from_chat(chat))
    assert [(m.channel, m.text) for m in kept if m.author == "assistant"] == [
        ("final", "one"), ("analysis", "new"), ("commentary", "{}"),
    ]  # fmt: skip
    thought = HarmonyMessage("assistant", "t", "analysis")
    assert drop_old_analysis([thought]) == [thought]


def test_recipients() -> None:
    assert split_recipient("browser.search") == ("browser", "search")
    assert split_recipient("python") == ("python", "python")
    assert [tool_kind(r) for r in ("functions.a", "browser.open", "python", "repo.list")] == [
        "function", "browser", "python", "mcp",
    ]  # fmt: skip
    assert BUILTIN_TOOLS["web_search_preview"] == "browser"
    assert "anything" not in BUILTIN_TOOLS
    assert text_of([{"type": "text", "text": "a"}, {"type": "x"}, "b"]) == "ab"


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        ({}, "() => any"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "(_: {\na?: string | null,\n}) => any"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "number"}]}}, "required": ["a"]},
         "(_: {\na: string | number,\n}) => any"),
        ({"properties": {"a": {"properties": {"b": {"type": "boolean"}}}}},
         "(_: {\na?: {\n  b?: boolean,\n},\n}) => any"),
        ({"properties": {"a": {"$ref": "#/x"}, "b": 7}}, "(_: {\na?: any,\nb?: any,\n}) => any"),
    ],
)  # fmt: skip
def test_types(schema: Any, shown: str) -> None:
    assert parameters_type(schema) == shown


@pytest.mark.req("SEC-13")
def test_a_hostile_schema_takes_no_longer_than_its_length() -> None:
    schema: Any = {"type": "string"}
    for _ in range(60):
        schema = {"type": ["array", "object", "array", "string", ["array"]] * 20, "items": schema,
                  "properties": {"a": {"type": "null"}}, "required": [[]]}  # fmt: skip
    assert len(parameters_type({"properties": {"x": schema}})) < 10_000


ANSWER = (
    "<|channel|>analysis<|message|>I < think\n<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a":"<|x|>"}<|call|><|start|>assistant to=browser.search'
    "<|channel|>analysis<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done <|"
)
FOUND = [
    Reasoning("I < think\n"), MessageBreak(), Content("Wait."), MessageBreak(), CallPiece(0, "add", ""),
    CallPiece(0, None, '{"a":"<|x|>"}'), MessageBreak(), CallPiece(1, "browser.search", ""),
    CallPiece(1, None, "{}"), MessageBreak(), Content("Done <|"),
]  # fmt: skip


def joined(segments: list[Any]) -> list[Any]:
    """Neighbouring pieces of the same thing as one."""
    result: list[Any] = []
    for segment in segments:
        last = result[-1] if result else None
        match segment, last:
            case (CallPiece(i, None, more), CallPiece(j, None, text)) if i == j:
                result[-1] = CallPiece(i, None, text + more)
            case (Reasoning(more), Reasoning(text)) | (Content(more), Content(text)):
                result[-1] = type(segment)(text + more)
            case _:
                result.append(segment)
    return result


def read(text: str, cuts: list[int]) -> list[Any]:
    reader, found, start = HarmonyReader(), list[Any](), 0
    for cut in [*sorted({c % (len(text) + 1) for c in cuts}), len(text)]:
        found += reader.feed(text[start:cut], last=False)
        start = cut
    return joined(found + reader.feed("", last=True))


def test_an_answer_by_channels() -> None:
    assert joined(HarmonyReader().feed(ANSWER, last=True)) == FOUND
    assert read(ANSWER, list(range(len(ANSWER)))) == FOUND
    assert parse_chat(ANSWER) == ("I < think\n", "Wait.Done <|")
    assert parse_chat("<|channel|>analysis<|message|>x") == ("x", None)


def test_text_without_marks_is_the_answer() -> None:
    assert parse_chat("Hello.") == (None, "Hello.")
    long = "word " * 1000
    assert parse_chat(long) == (None, long)
    assert read(long, [7, 2000]) == [Content(long)]


_MARKS = st.sampled_from(
    ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "analysis", "final", " to=a.b",
     "commentary", "assistant", "<", "|", "text ", "<|", "x" * 300]
)  # fmt: skip


@pytest.mark.req("REL-16", "SEC-15")
@given(st.lists(_MARKS, max_size=30).map("".join), st.lists(st.integers(0, 10_000), max_size=12))
def test_any_cut_gives_the_same(text: str, cuts: list[int]) -> None:
    assert read(text, cuts) == joined(HarmonyReader().feed(text, last=True))


# There and back: what a model wrote, as history


HEADS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": "I look.", "reasoning": "Use get_weather.",
     "tool_calls": [call("get_weather", '{"location": "Oslo"}')]},
    {"role": "tool", "tool_call_id": "1", "content": '{"sun": true}'},
]  # fmt: skip


def tokens(text: str) -> list[str]:
    """As the models' tokenizer would cut it: marks are one token each, texts are words."""
    marks = "|".join(map(re.escape, HEADS))
    return [part for part in re.split(rf"({marks}|\s*\w+)", text) if part]


def written(talk: list[dict[str, Any]], effort: str = "medium") -> str:
    """The text of the model's last turn, as the prompt repeats it."""
    text = render(ChatPrompt(messages=talk, tools=[WEATHER]), effort=effort, today=DAY)
    user = "<|start|>user<|message|>Weather in Oslo?<|end|><|start|>assistant"
    return text.split(user)[1].removesuffix("<|start|>assistant")


def test_what_was_read_is_written_the_same() -> None:
    """Token by token, a turn with reasoning, a preamble and a call."""
    text = written(TALK[:4])
    reader, found = HarmonyReader(), list[Any]()
    for token in tokens(text):
        found += reader.feed(token, last=False)
    found += reader.feed("", last=True)
    assert [s for s in joined(found) if s != MessageBreak()] == [
        Reasoning("Use get_weather."), Content("I look."), CallPiece(0, "get_weather", ""),
        CallPiece(0, None, '{"location": "Oslo"}'),
    ]  # fmt: skip
    assert "".join(reader.thoughts) == "Use get_weather."
    # The prompt of the next turn begins with the tokens of this one: the cache finds them.
    assert written(TALK).startswith(text)
    assert written(TALK).endswith(
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"sun": true}'
        "<|end|>"
    )


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_roles_and_effort(effort: str) -> None:
    text = render(ChatPrompt(messages=TALK, tools=[WEATHER]), effort=effort, today=DAY)
    assert f"\n\nReasoning: {effort}\n\n" in text
    assert (
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\nUse tools.\n\n# Tools" in text
    )
    assert (
        text.count("<|start|>system<|message|>") == text.count("<|start|>developer<|message|>") == 1
    )


def test_the_published_package_reads_what_we_write() -> None:
    """And we read what it writes."""
    package = pytest.importorskip("openai_harmony", reason="openai_harmony is not installed")
    try:
        encoding = package.load_harmony_encoding(package.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as error:  # its vocabulary is fetched from the network
        pytest.skip(f"openai_harmony cannot load its vocabulary: {type(error).__name__}")
    text = written(TALK[:4])
    read = encoding.parse_messages_from_completion_tokens(
        encoding.encode(text, allowed_special="all"), package.Role.ASSISTANT
    )
    assert [(m.channel, m.recipient, m.content[0].text) for m in read] == [
        ("analysis", None, "Use get_weather."), ("commentary", None, "I look."),
        ("commentary", "functions.get_weather", '{"location": "Oslo"}'),
    ]  # fmt: skip
    again = encoding.decode_utf8(
        encoding.render_conversation(package.Conversation.from_messages(read))
    )
    ours = HarmonyReader().feed(again.removeprefix("<|start|>assistant"), last=True)
    assert [s.name for s in ours if isinstance(s, CallPiece) and s.name] == ["get_weather"]
    assert "".join(s.text for s in ours if isinstance(s, Reasoning)) == "Use get_weather."


def test_a_call_without_arguments_is_json() -> None:
    head = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
    for text in (head, head + "<|call|>"):
        calls = [s for s in HarmonyReader().feed(text, last=True) if isinstance(s, CallPiece)]
        assert "".join(c.arguments for c in calls) == "{}"
    assert read(head + "<|call|>", [3, len(head)])[1] == CallPiece(0, None, "{}")


def test_text_without_marks_is_not_held_back() -> None:
    reader = HarmonyReader()
    assert reader.feed("Hel", last=False) == [Content("Hel")]
    assert reader.feed("lo", last=False) == [Content("lo")]
    assert HarmonyReader().feed("<|chan", last=False) == []
    assert HarmonyReader().feed('{"a": "<|message|>"}', last=True) == [
        Content('{"a": "<|message|>"}')
    ]


def test_tools_of_developer_messages() -> None:
    """API-CHAT-CONTENT: a developer message may bring tools."""
    chat: list[dict[str, Any]] = [
        {"role": "developer", "content": "Help.", "tools": [WEATHER]},
        {"role": "user", "content": "Hi"},
    ]
    text = render(ChatPrompt(messages=chat), today=DAY)
    assert "type get_weather = (_: {" in text
    assert "Calls to these tools must go to the commentary channel" in text
    for wrong in ("x", ["x"], [{"type": "function"}], {"a": 1}):
        chat[0]["tools"] = wrong
        with pytest.raises(RequestError, match="tools"):
            render(ChatPrompt(messages=chat))


def test_malformed_calls_are_refused() -> None:
    for wrong in ({}, {"function": "x"}, {"function": {"name": 7}}):
        chat = [{"role": "assistant", "content": None, "tool_calls": [wrong]}]
        with pytest.raises(RequestError, match="tool_calls"):
            render(ChatPrompt(messages=chat))
    function: Any = {"function": {"name": "f", "arguments": {"a": True}}}
    (sent,) = from_chat([{"role": "assistant", "content": None, "tool_calls": [function]}])
    assert sent.text == '{"a":true}'
