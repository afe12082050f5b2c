"""Reasoning formats: each passes the suite with its own texts."""

from __future__ import annotations

import pytest

from headrace_core.text import AnswerContext, ReasoningParser
from headrace_server.reasoning_parsers.formats.deepseek_r1 import DeepSeekR1ReasoningParser
from headrace_server.reasoning_parsers.formats.deepseek_v3 import DeepSeekV3ReasoningParser
from headrace_server.reasoning_parsers.formats.ernie45 import Ernie45ReasoningParser
from headrace_server.reasoning_parsers.formats.glm45 import Glm45ReasoningParser
from headrace_server.reasoning_parsers.formats.granite import GraniteReasoningParser
from headrace_server.reasoning_parsers.formats.holo2 import Holo2ReasoningParser
from headrace_server.reasoning_parsers.formats.hunyuan_a13b import HunyuanReasoningParser
from headrace_server.reasoning_parsers.formats.minimax_m2 import MiniMaxM2ReasoningParser
from headrace_server.reasoning_parsers.formats.minimax_m2_append_think import (
    MiniMaxM2AppendThinkReasoningParser,
)
from headrace_server.reasoning_parsers.formats.mistral import MistralReasoningParser
from headrace_server.reasoning_parsers.formats.olmo3 import Olmo3ReasoningParser
from headrace_server.reasoning_parsers.formats.openai_gptoss import GptOssReasoningParser
from headrace_server.reasoning_parsers.formats.qwen3 import Qwen3ReasoningParser
from headrace_server.reasoning_parsers.formats.seed_oss import SeedOssReasoningParser
from headrace_server.reasoning_parsers.formats.step3 import Step3ReasoningParser
from headrace_server.tool_parsers.formats.openai import OpenAIToolParser
from headrace_testing.parsers.reasoning import ReasoningParserConformance

pytestmark = [pytest.mark.req("SEC-15"), pytest.mark.req("REL-16")]

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
    parser = Glm45ReasoningParser
    golden = (*MARKED, *UNMARKED)


class TestDeepSeekR1(ReasoningParserConformance):
    parser: type[ReasoningParser] = DeepSeekR1ReasoningParser
    golden = BEGUN


class TestMiniMaxM2(TestDeepSeekR1):
    parser = MiniMaxM2ReasoningParser


class TestOlmo3(TestDeepSeekR1):
    parser = Olmo3ReasoningParser


class TestStep3(TestDeepSeekR1):
    parser = Step3ReasoningParser


class TestHolo2(TestDeepSeekR1):
    parser = Holo2ReasoningParser


class TestDeepSeekV3Thinking(TestDeepSeekR1):
    parser = DeepSeekV3ReasoningParser
    context = AnswerContext(chat_template_kwargs={"thinking": True})


class TestDeepSeekV3(ReasoningParserConformance):
    parser = DeepSeekV3ReasoningParser
    golden = (("so", "", "so"), ("why</think>so", "", "why</think>so"))


class TestHolo2NotThinking(ReasoningParserConformance):
    parser = Holo2ReasoningParser
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
    parser = DeepSeekR1ReasoningParser


class TestGranite(ReasoningParserConformance):
    parser = GraniteReasoningParser
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
    parser = HunyuanReasoningParser
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
    parser = Ernie45ReasoningParser
    alphabet = ("<think>", "</think>", "<response>", "</response>", "\n", "</")
    golden = (
        ("why\n</think>\n\n<response>\nso\n</response>\n", "why", "so\n"),
        ("why</think>so", "why", "so"),
        ("cut", "cut", ""),
        ("why</think>\n\n<tool_call>{}</tool_call>", "why", "\n\n<tool_call>{}</tool_call>"),
    )


class TestMiniMaxM2AppendThink(ReasoningParserConformance):
    parser = MiniMaxM2AppendThinkReasoningParser
    golden = (("why</think>so", "", "<think>why</think>so"), ("cut", "", "<think>cut"))


class TestMistral(ReasoningParserConformance):
    parser = MistralReasoningParser
    alphabet = ("[THINK]", "[/THINK]", "[", "[/")
    golden = (
        ("[THINK]why[/THINK]so", "why", "so"),
        ("[THINK]cut", "cut", ""),
        ("so[/THINK]", "", "so[/THINK]"),
    )


class TestSeedOss(ReasoningParserConformance):
    parser = SeedOssReasoningParser
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
    assert DeepSeekV3ReasoningParser(context).feed("so").content == "so"
    context = AnswerContext("<think>", {"thinking": False})
    assert DeepSeekV3ReasoningParser(context).feed("why ").reasoning == "why "
