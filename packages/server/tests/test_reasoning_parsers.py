"""Reasoning formats: each passes the suite with its own texts."""

from __future__ import annotations

import pytest

from headrace_core.testing.reasoning_parser import ReasoningParserConformance
from headrace_core.text import AnswerContext, ReasoningParser
from headrace_server.reasoning_parsers import marked
from headrace_server.reasoning_parsers.harmony import GptOssReasoningParser
from headrace_server.reasoning_parsers.qwen3 import Qwen3ReasoningParser
from headrace_server.tool_parsers.harmony import OpenAIToolParser

pytestmark = [
    pytest.mark.spec("REASON-PARSER"),
    pytest.mark.req("SEC-15"),
    pytest.mark.req("REL-16"),
]

MARKED = (
    ("<think>why</think>so", "why", "so"),
    ("\n<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
    ("<think></think>so", "", "so"),
    ("<think>cut", "cut", ""),
    ("<think>cut</thi", "cut</thi", ""),
    ("<think>a</think>b</think>c", "a", "b</think>c"),
    ("<think>a < b</think><tool_call>{}</tool_call>", "a < b", "<tool_call>{}</tool_call>"),
)
BEGUN = (
    *MARKED,
    ("why</think>so", "why", "so"),
    ("</think>so", "", "so"),
    ("cut", "cut", ""),
    ("\n\nwhy</think>\n", "\n\nwhy", "\n"),
    ("why <think> not</think>so", "why <think> not", "so"),
)
UNMARKED = (
    ("so", "", "so"),
    ("<thin", "", "<thin"),
    ("so <think>late</think>", "", "so <think>late</think>"),
    ("  ", "", "  "),
)


class TestQwen3(ReasoningParserConformance):
    parser = Qwen3ReasoningParser
    golden = (*MARKED, *UNMARKED)


class TestGlm45(ReasoningParserConformance):
    parser = marked.Glm45ReasoningParser
    golden = (*MARKED, *UNMARKED)


class TestDeepSeekR1(ReasoningParserConformance):
    parser: type[ReasoningParser] = marked.DeepSeekR1ReasoningParser
    golden = BEGUN


class TestMiniMaxM2(TestDeepSeekR1):
    parser = marked.MiniMaxM2ReasoningParser


class TestOlmo3(TestDeepSeekR1):
    parser = marked.Olmo3ReasoningParser


class TestStep3(TestDeepSeekR1):
    parser = marked.Step3ReasoningParser


class TestHolo2(TestDeepSeekR1):
    parser = marked.Holo2ReasoningParser


class TestDeepSeekV3Thinking(TestDeepSeekR1):
    parser = marked.DeepSeekV3ReasoningParser
    context = AnswerContext(chat_template_kwargs={"thinking": True})


class TestDeepSeekV3(ReasoningParserConformance):
    parser = marked.DeepSeekV3ReasoningParser
    golden = (("so", "", "so"), ("why</think>so", "", "why</think>so"))


class TestHolo2NotThinking(ReasoningParserConformance):
    parser = marked.Holo2ReasoningParser
    context = AnswerContext(chat_template_kwargs={"thinking": False})
    golden = (("so", "", "so"), ("why</think>so", "", "why</think>so"))


class TestPromptOpened(ReasoningParserConformance):
    """The template wrote the opening mark, so the text begins with reasoning."""

    parser = Qwen3ReasoningParser
    context = AnswerContext(prompt_end="<|im_start|>assistant\n<think>\n")
    golden = (
        ("why</think>so", "why", "so"),
        ("<think>why</think>so", "why", "so"),
        ("cut", "cut", ""),
    )


class TestPromptClosed(ReasoningParserConformance):
    """The template wrote an empty reasoning, so all is the answer."""

    parser: type[ReasoningParser] = Qwen3ReasoningParser
    context = AnswerContext(prompt_end="<|im_start|>assistant\n<think>\n\n</think>\n\n")
    golden = (("so", "", "so"), ("<think>so</think>", "", "<think>so</think>"))


class TestPromptClosedThoughBegun(TestPromptClosed):
    parser = marked.DeepSeekR1ReasoningParser


class TestGranite(ReasoningParserConformance):
    parser = marked.GraniteReasoningParser
    alphabet = (
        "Here is my thought process:", "Here's my thought process:", "Here is my response:",
        "Here's my response:", "Here is", "Here's my ",
    )  # fmt: skip
    golden = (
        ("Here is my thought process: why Here is my response: so", " why ", " so"),
        ("Here's my thought process:why. Here's my response:so", "why. ", "so"),
        ("Here's my thought process: Here is my thing", " Here is my thing", ""),
        ("Here is the answer.", "", "Here is the answer."),
    )

    def test_it_has_no_mark_for_constraints(self) -> None:
        assert self.parser.end_marker == ""


class TestHunyuan(ReasoningParserConformance):
    parser = marked.HunyuanReasoningParser
    alphabet = ("<think>", "</think>", "<answer>", "</answer>", "\n", "<", "</")
    golden = (
        ("<think>\nwhy\n</think>\n<answer>\nso\n</answer>", "why", "so"),
        ("<think>why</think><answer>so</answer>", "why", "so"),
        ("<think>\nwhy\n</think>\nso", "why", "\nso"),
        ("<think>\nwhy\n\n</think>\n\n<answer>\nso", "why\n", "so"),
        ("<answer>\nso\n</answer>", "", "so"),
        ("<think>\ncut", "cut", ""),
    )


class TestErnie45(ReasoningParserConformance):
    parser = marked.Ernie45ReasoningParser
    alphabet = ("<think>", "</think>", "<response>", "</response>", "\n", "</")
    golden = (
        ("why\n</think>\n\n<response>\nso\n</response>\n", "why", "so\n"),
        ("why</think>so", "why", "so"),
        ("cut", "cut", ""),
        ("why</think>\n\n<tool_call>{}</tool_call>", "why", "\n\n<tool_call>{}</tool_call>"),
    )


class TestMiniMaxM2AppendThink(ReasoningParserConformance):
    parser = marked.MiniMaxM2AppendThinkReasoningParser
    golden = (("why</think>so", "", "<think>why</think>so"), ("cut", "", "<think>cut"))


class TestMistral(ReasoningParserConformance):
    parser = marked.MistralReasoningParser
    alphabet = ("[THINK]", "[/THINK]", "[", "[/")
    golden = (
        ("[THINK]why[/THINK]so", "why", "so"),
        ("[THINK]cut", "cut", ""),
        ("so[/THINK]", "", "so[/THINK]"),
    )


class TestSeedOss(ReasoningParserConformance):
    parser = marked.SeedOssReasoningParser
    alphabet = ("<seed:think>", "</seed:think>", "</seed")
    golden = (
        ("<seed:think>why</seed:think>so", "why", "so"),
        ("why</seed:think>so", "why", "so"),
        ("cut", "cut", ""),
    )


class TestGptOss(ReasoningParserConformance):
    parser = GptOssReasoningParser
    alphabet = (
        "<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|message|>", "<|end|>",
        "<|return|>", "<|channel|>commentary to=functions.f", "<|call|>",
    )  # fmt: skip
    golden = (
        (
            "<|channel|>analysis<|message|>why<|end|><|channel|>final<|message|>so<|return|>",
            "why",
            "so",
        ),
        ("<|channel|>analysis<|message|>cut", "cut", ""),
        ("<|channel|>final<|message|>so", "", "so"),
        ("plain", "", "plain"),
        ("<|channel|>fin", "", "<|channel|>fin"),
    )

    def test_messages_to_tools_reach_the_tool_parser(self) -> None:
        call = (
            "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
            '{"a": 1}<|call|>'
        )
        text = "<|channel|>analysis<|message|>why<|end|>" + call
        reasoning, content = self.read(list(text))
        assert (reasoning, content) == ("why", call)
        content, calls = OpenAIToolParser().parse(content)
        assert (content, [(c.name, c.arguments) for c in calls]) == ("", [("f", '{"a": 1}')])


def test_the_prompt_wins_over_the_switch() -> None:
    context = AnswerContext("<think>\n\n</think>", {"thinking": True})
    assert marked.DeepSeekV3ReasoningParser(context).feed("so").content == "so"
    context = AnswerContext("<think>", {"thinking": False})
    assert marked.DeepSeekV3ReasoningParser(context).feed("why ").reasoning == "why "
