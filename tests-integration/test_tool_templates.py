"""The chat templates of ``examples/``: a conversation renders, and its call is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_core import plugins
from headrace_engine.input_processing.chat.content import normalize_messages
from headrace_engine.input_processing.chat.content_format import detect_content_format
from headrace_engine.input_processing.chat.sandbox import TemplateRefused, render_template

EXAMPLES = Path(__file__).parents[1] / "examples"
PARSERS = {
    "llama3.1_json": "llama3_json",
    "llama3.2_json": "llama3_json",
    "llama3.2_pythonic": "pythonic",
    "llama4_json": "llama4_json",
    "llama4_pythonic": "llama4_pythonic",
    "mistral": "mistral",
    "mistral_parallel": "mistral",
    "hermes": "hermes",
    "granite": "granite",
    "granite_20b_fc": "granite-20b-fc",
    "internlm2_tool": "internlm",
    "toolace": "pythonic",
    "xlam_llama": "xlam",
    "xlam_qwen": "xlam",
    "deepseekv3": "deepseek_v3",
    "deepseekr1": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "minimax_m1": "minimax",
    "functiongemma": "functiongemma",
}
"""Template -> parser."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a day.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "units": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": 'Zürich, "Altstadt"', "days": 3, "exact": True, "units": ["°C", "mm"]}


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": json.dumps(arguments)}
    return {"id": f"chatcmpl-tool-{number:09}", "type": "function", "function": function}


def conversation(*arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """System, question, calls, their results, answer."""
    calls = [call(number, given) for number, given in enumerate(arguments)]
    results = [
        {"role": "tool", "tool_call_id": c["id"], "name": "get_weather", "content": f"rain {n}"}
        for n, c in enumerate(calls)
    ]
    return [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Will it rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        *results,
        {"role": "assistant", "content": "Yes, it will."},
    ]


def render(source: str, messages: list[dict[str, Any]], *, prompt: bool) -> str:
    variables = {
        "messages": normalize_messages(messages, detect_content_format(source)),
        "tools": TOOLS,
        "add_generation_prompt": prompt,
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    return render_template(source, variables, 1 << 16)


def read(name: str) -> str:
    return (EXAMPLES / f"tool_chat_template_{name}.jinja").read_text(encoding="utf-8")


def test_each_template_is_listed() -> None:
    names = {path.name for path in EXAMPLES.glob("*.jinja")}
    names = {name for name in names if not name.startswith("score_template_")}
    expected = {f"tool_chat_template_{name}.jinja" for name in PARSERS}
    assert names == expected | {"template_vlm2vec_phi3v.jinja"}


@pytest.mark.parametrize("name", PARSERS)
def test_a_conversation_renders_and_its_calls_are_read_back(name: str) -> None:
    source = read(name)
    several = [ARGUMENTS] if name == "internlm2_tool" else [ARGUMENTS, {"city": "Bern"}]
    for arguments in ([ARGUMENTS], several):
        messages = conversation(*arguments)
        question = render(source, messages[:2], prompt=True)
        called = render(source, messages[:3], prompt=False)
        assert called.startswith(question), "the model continues where the prompt ends"
        parser = plugins.load("headrace.tool_parsers", PARSERS[name])(TOOLS)
        content, calls = parser.parse(called[len(question) :])
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            ("get_weather", given) for given in arguments
        ]
        assert len(content) < 20, "nothing but the end of the turn is left"
        whole = render(source, messages, prompt=False)
        assert whole.startswith(called)
        places = [whole.index(t) for t in ("Will it rain?", "rain 0", "Yes, it will.")]
        assert places == sorted(places)
        assert "Be short." in whole
        assert "The weather of a day." in question
        assert whole.count("The weather of a day.") == 1


@pytest.mark.parametrize("name", PARSERS)
def test_without_tools_none_are_mentioned(name: str) -> None:
    text = render_template(
        read(name),
        {"messages": [{"role": "user", "content": "Hi"}], "tools": None,
         "add_generation_prompt": True},
        1 << 16,
    )  # fmt: skip
    assert "Hi" in text
    assert "tool" not in text.lower()
    assert "None" not in text


def test_mistral_cuts_ids_to_nine_characters() -> None:
    text = render(read("mistral"), conversation(ARGUMENTS), prompt=False)
    assert '"id": "000000000"' in text
    assert '"call_id": "000000000"' in text
    short = conversation(ARGUMENTS)
    short[2]["tool_calls"][0]["id"] = "x"
    with pytest.raises(TemplateRefused):
        render(read("mistral"), short, prompt=False)


def test_llama_3_2_and_vlm2vec_take_images() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    variables = {"messages": [{"role": "user", "content": parts}], "add_generation_prompt": False}
    assert "<|image|>What is it?" in render_template(read("llama3.2_json"), variables, 1 << 16)
    source = (EXAMPLES / "template_vlm2vec_phi3v.jinja").read_text(encoding="utf-8")
    assert render_template(source, variables, 1 << 16) == "<|image_1|> What is it?"
    assert detect_content_format(source) == "openai"
