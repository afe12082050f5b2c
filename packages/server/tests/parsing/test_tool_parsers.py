"""Tool-call formats: each passes the suite, and has its own hard cases."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from headrace_core.text import ToolCall, ToolCallParser
from headrace_server.tool_parsers.forced import ForcedToolCallParser, NamedToolCallParser
from headrace_server.tool_parsers.formats.deepseek_v3 import DeepSeekV3ToolParser
from headrace_server.tool_parsers.formats.deepseek_v31 import DeepSeekV31ToolParser
from headrace_server.tool_parsers.formats.deepseek_v32 import DeepSeekV32ToolParser
from headrace_server.tool_parsers.formats.ernie45 import Ernie45ToolParser
from headrace_server.tool_parsers.formats.functiongemma import FunctionGemmaToolParser
from headrace_server.tool_parsers.formats.gigachat3 import GigaChat3ToolParser
from headrace_server.tool_parsers.formats.glm45 import Glm45ToolParser
from headrace_server.tool_parsers.formats.granite import GraniteToolParser
from headrace_server.tool_parsers.formats.granite_20b_fc import Granite20bToolParser
from headrace_server.tool_parsers.formats.hermes import HermesToolParser
from headrace_server.tool_parsers.formats.hunyuan_a13b import HunyuanToolParser
from headrace_server.tool_parsers.formats.internlm import InternLmToolParser
from headrace_server.tool_parsers.formats.jamba import JambaToolParser
from headrace_server.tool_parsers.formats.kimi_k2 import KimiK2ToolParser
from headrace_server.tool_parsers.formats.llama3_json import Llama3JsonToolParser
from headrace_server.tool_parsers.formats.llama4_pythonic import Llama4PythonicToolParser
from headrace_server.tool_parsers.formats.longcat import LongCatToolParser
from headrace_server.tool_parsers.formats.minimax import MiniMaxToolParser
from headrace_server.tool_parsers.formats.minimax_m2 import MiniMaxM2ToolParser
from headrace_server.tool_parsers.formats.mistral import MistralToolParser
from headrace_server.tool_parsers.formats.olmo3 import Olmo3ToolParser
from headrace_server.tool_parsers.formats.openai import OpenAIToolParser
from headrace_server.tool_parsers.formats.phi4_mini_json import Phi4MiniToolParser
from headrace_server.tool_parsers.formats.pythonic import PythonicToolParser
from headrace_server.tool_parsers.formats.qwen3_xml import Qwen3XmlToolParser
from headrace_server.tool_parsers.formats.seed_oss import SeedOssToolParser
from headrace_server.tool_parsers.formats.step3 import Step3ToolParser
from headrace_server.tool_parsers.formats.xlam import XlamToolParser
from headrace_testing.parsers.tool_calls import NUM_SPLITS, ToolCallParserConformance

pytestmark = [pytest.mark.req("SEC-15"), pytest.mark.req("REL-16")]


def value(parsed: Any) -> str:
    """A parameter's bare text."""
    return parsed if isinstance(parsed, str) else json.dumps(parsed, ensure_ascii=False)


def called(*calls: tuple[str, str]) -> list[ToolCall]:
    return [ToolCall(*call) for call in calls]


class Objects(ToolCallParserConformance):
    """Formats with one JSON object a call."""

    before, after, member = "", "", "arguments"

    def write_object(self, name: str, arguments: str) -> str:
        return f'{{"name": "{name}", "{self.member}": {arguments}}}'

    def write_call(self, name: str, arguments: str) -> str:
        return self.before + self.write_object(name, arguments) + self.after


class Lists(Objects):
    """Formats with a JSON list of such objects."""

    def write_call(self, name: str, arguments: str) -> str:
        return self.write_calls([(name, arguments)])

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        return self.before + ", ".join(self.write_object(*call) for call in calls) + self.after


BROKEN_OBJECTS = (
    "{}",
    "{]",
    "nothing",
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "a b", "arguments": {}}',
    '{"name": "add", "arguments": "{}"}',
    '{"name": "add", "arguments": [1]}',
    '{"name": "add" "arguments": {}}',
    '{"name" "add", "arguments": {}}',
    '{name: "add", "arguments": {}}',
    '{"name": "\\ud800", "arguments": {}}',
)


class TestHermes(Objects):
    parser = HermesToolParser
    before, after = "<tool_call>\n", "\n</tool_call>"
    alphabet = ("<tool_call>", "</tool_call>", "</tool", '{"name": "x"}', '"arguments"')
    broken = (
        "<tool_call></tool_call>",
        "</tool_call>",
        "<tool_call><tool_call>",
        *(f"<tool_call>{text}</tool_call>" for text in BROKEN_OBJECTS),
    )

    def test_arguments_keep_their_spelling(self) -> None:
        text = '<tool_call>{"arguments": { "a" :1.50 }, "name": "f"}</tool_call>'
        assert HermesToolParser().parse(text) == ("", [ToolCall("f", '{ "a" :1.50 }')])

    def test_arguments_are_given_away_as_they_come(self) -> None:
        parser = HermesToolParser()
        pieces = ['<tool_call>{"name": "f", "argu', 'ments": {"a', '": "x', 'y"', "}}</tool_call>"]
        deltas = [parser.feed(piece).tool_calls for piece in pieces]
        assert [[(c.name, c.arguments) for c in calls] for calls in deltas] == [
            [],
            [("f", '{"a')],
            [(None, '": "x')],
            [(None, 'y"')],
            [(None, "}")],
        ]

    def test_a_closing_tag_inside_a_string_ends_nothing(self) -> None:
        text = self.write_call("run", '{"text": "</tool_call> \\" <tool_call>"}')
        content, calls = self.read(list(text))
        assert (content, len(calls)) == ("", 1)
        assert calls[0].arguments == '{"text": "</tool_call> \\" <tool_call>"}'

    def test_white_space_beside_calls_is_dropped(self) -> None:
        call = self.write_call("add", "{}")
        assert self.read([f"Hi \n{call}\n\n{call}\n"])[0] == "Hi"
        assert self.read([f"Hi \n{call}\n\nthere \n"])[0] == "Hi\n\nthere \n"

    @pytest.mark.parametrize(
        ("arguments", "kept"),
        [
            ('{"a": 01}', '{"a": 0'),
            ('{"a": 1', '{"a": 1'),
            ('{"a": tru}', '{"a": tru'),
            ('{"a": [1}', '{"a": [1'),
            ('{"a": "\\x"}', '{"a": "\\'),
            ('{"a": 1,}', '{"a": 1,'),
            ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"a": ' + "[" * 127),
        ],
    )
    def test_what_was_given_of_a_broken_call_stands(self, arguments: str, kept: str) -> None:
        text = f'Hi <tool_call>{{"name": "add", "arguments": {arguments}</tool_call> there'
        assert self.read([text]) == ("Hi there", called(("add", kept)))
        self.split_everywhere(text[:200])

    def test_text_behind_complete_arguments_is_content(self) -> None:
        text = '<tool_call>{"name": "add", "arguments": {"a": 1}} or</tool_call> so'
        assert self.read([text]) == ("or so", called(("add", '{"a": 1}')))
        self.split_everywhere(text)

    def test_control_characters_in_strings_become_escapes(self) -> None:
        text = '<tool_call>{"name": "add", "arguments": {"text": "a\n\tb\x01"}}</tool_call>'
        _, (call,) = self.read([text])
        assert json.loads(call.arguments) == {"text": "a\n\tb\x01"}
        self.split_everywhere(text)

    def test_a_call_without_arguments_has_empty_ones(self) -> None:
        assert self.read(['<tool_call>{"name": "f"}</tool_call>']) == ("", called(("f", "{}")))


class TestLongCat(Objects):
    parser = LongCatToolParser
    before, after = "<longcat_tool_call>", "</longcat_tool_call>"
    alphabet = (before, after)
    broken = tuple(f"<longcat_tool_call>{text}" for text in BROKEN_OBJECTS)


class TestErnie45(Objects):
    parser = Ernie45ToolParser
    before, after = "<tool_call>\n", "\n</tool_call>\n"
    alphabet = (before, after)
    broken = tuple(f"<tool_call>\n{text}\n</tool_call>" for text in BROKEN_OBJECTS)


class TestGranite(Lists):
    parser = GraniteToolParser
    before, after = "<|tool_call|>[", "]"
    alphabet = (before, "<tool_call>", "<|tool")
    broken = (
        "<|tool_call|>{}",
        "<tool_call>[]",
        '<|tool_call|>{"name": "add", "arguments": {}}',
        *(f"<|tool_call|>[{text}]" for text in BROKEN_OBJECTS),
    )

    def test_the_mark_of_3_1(self) -> None:
        text = '<tool_call>[{"arguments": {"a": 1}, "name": "add"}, {"name": "f", "arguments": {}}]'
        assert self.read([text]) == ("", called(("add", '{"a": 1}'), ("f", "{}")))
        self.split_everywhere(text)


class TestGranite20b(Objects):
    parser = Granite20bToolParser
    before = "<function_call> "
    alphabet = ("<function_call>", "<function")
    broken = tuple(f"<function_call> {text}" for text in BROKEN_OBJECTS)


class TestInternLm(Objects):
    parser = InternLmToolParser
    before, after, member = "<|action_start|><|plugin|>\n", "<|action_end|>\n", "parameters"
    alphabet = ("<|action_start|>", "<|plugin|>", "<|action_end|>", "<|a")
    broken = (
        '<|action_start|>{"name": "add", "parameters": {}}',
        "<|action_start|><|interpreter|>print()<|action_end|>",
        *(f"<|action_start|> <|plugin|>{text}<|action_end|>" for text in BROKEN_OBJECTS),
    )


class TestJamba(Lists):
    parser = JambaToolParser
    before, after = "<tool_calls>[\n    ", "\n]</tool_calls>"
    alphabet = ("<tool_calls>", "</tool_calls>", "[", "]")
    broken = (
        "<tool_calls>[]</tool_calls>",
        *(f"<tool_calls>[{text}]</tool_calls>" for text in BROKEN_OBJECTS),
    )


class TestHunyuan(Lists):
    parser = HunyuanToolParser
    before, after = "<tool_calls>[", "]</tool_calls>"
    alphabet = ("<tool_calls>", "</tool_calls>", "<think>", "</think>")
    broken = tuple(f"<tool_calls>[{text}]</tool_calls>" for text in BROKEN_OBJECTS)

    def test_reasoning_holds_no_calls(self) -> None:
        call = self.write_call("add", "{}")
        text = f"<think>{call}</think>\n{call}"
        assert self.read([text]) == (f"<think>{call}</think>", called(("add", "{}")))
        self.split_everywhere(text)
        assert self.read([f"<think>{call}"]) == (f"<think>{call}", [])


class TestMiniMax(Objects):
    parser = MiniMaxToolParser
    before, after = "<tool_calls>\n", "\n</tool_calls>"
    alphabet = ("<tool_calls>", "</tool_calls>", "<think>", "</think>")
    broken = tuple(f"<tool_calls>{text}</tool_calls>" for text in BROKEN_OBJECTS)

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        objects = "\n".join(self.write_object(*call) for call in calls)
        return f"<tool_calls>\n{objects}\n</tool_calls>"

    def test_reasoning_holds_no_calls(self) -> None:
        call = self.write_call("add", "{}")
        assert self.read([f"<think>{call}</think>{call}"]) == (
            f"<think>{call}</think>",
            called(("add", "{}")),
        )


class TestPhi4Mini(Lists):
    parser = Phi4MiniToolParser
    before, after = "functools[", "]"
    alphabet = ("functools[", "functools", "func")
    broken = ("functools[]", "functools", *(f"functools[{text}]" for text in BROKEN_OBJECTS))


class TestLlama3Json(Objects):
    parser = Llama3JsonToolParser
    before, member = "<|python_tag|>", "parameters"
    alphabet = ("<|python_tag|>", ";", "; ", '{"name": "x", "parameters": {}}')
    broken = tuple(f"<|python_tag|>{text}" for text in BROKEN_OBJECTS)

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        return "<|python_tag|>" + "; ".join(self.write_object(*call) for call in calls)

    def test_bare_objects_at_the_beginning(self) -> None:
        text = '{"name": "add", "parameters": {"a": 1}}; {"name": "f", "arguments": {}}'
        assert self.read([text]) == ("", called(("add", '{"a": 1}'), ("f", "{}")))
        self.split_everywhere(text)
        assert self.read(["So: " + text]) == ("So: " + text, [])

    def test_json_that_is_no_call_is_content(self) -> None:
        for text in ('{"name": "Ann", "age": 3}', '{"a": [1, 2]}', '{"name": "add"}', "{"):
            assert self.read([text]) == (text, [])
            self.split_everywhere(text)

    def test_json_that_is_an_answer_is_not_held_back(self) -> None:
        parser = self.make()
        assert parser.feed('{"answer": [1, 2, ').content == '{"answer": [1, 2,'


class TestXlam(Lists):
    parser = XlamToolParser
    before, after = "[TOOL_CALLS][", "]"
    alphabet = ("[TOOL_CALLS]", "<tool_call>", "</tool_call>", "```json", "```", "</think>")
    broken = ("```json\n{}\n```", *(f"[TOOL_CALLS][{text}]" for text in BROKEN_OBJECTS))

    @pytest.mark.parametrize(
        ("before", "after", "content"),
        [
            ("", "", ""),
            ("<think>[1] </think>\n", "", "<think>[1] </think>"),
            ("Sure:\n```json\n", "\n```", "Sure:"),
            ("Sure: ```", "```", "Sure:"),
            ("<tool_call>", "</tool_call>", ""),
            ("[TOOL_CALLS] ", "", ""),
        ],
    )
    def test_all_spellings(self, before: str, after: str, content: str) -> None:
        calls = '[{"name": "add", "arguments": {"a": 1}}, {"name": "f", "arguments": {}}]'
        text = before + calls + after
        assert self.read([text]) == (content, called(("add", '{"a": 1}'), ("f", "{}")))
        self.split_everywhere(text)

    def test_code_is_content(self) -> None:
        text = "See:\n```python\nprint([1])\n```\nand ```json\n[1, 2]\n``` or [x]."
        assert self.read([text]) == (text, [])


class TestGigaChat3(Objects):
    parser = GigaChat3ToolParser
    before = "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    alphabet = ("<|message_sep|>", "function call", "<|role_sep|>", "function")
    broken = tuple(f"function call{text}" for text in BROKEN_OBJECTS)

    def test_the_marks_around_it_may_be_missing(self) -> None:
        text = 'Hm. function call\n{"name": "add", "arguments": {"a": 1}}'
        assert self.read([text]) == ("Hm.", called(("add", '{"a": 1}')))
        assert self.read(["A function call is made."]) == ("A function call is made.", [])


class TestMistral(Lists):
    parser = MistralToolParser
    before, after = "[TOOL_CALLS] [", "]"
    alphabet = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add", "[TOOL")
    broken = (
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]{}",
        "[TOOL_CALLS]add[1]",
        "[TOOL_CALLS]add to {}",
        "[TOOL_CALLS]add[ARGS][]",
        "[TOOL_CALLS]" + "a" * 500 + "{}",
    )

    @pytest.mark.parametrize("middle", ["", "[ARGS]", "[CALL_ID]abCD12345[ARGS]"])
    def test_a_name_before_the_arguments(self, middle: str) -> None:
        text = f'Hi[TOOL_CALLS]add{middle}{{"a": 1}}[TOOL_CALLS]f{middle}{{}}'
        assert self.read([text]) == ("Hi", called(("add", '{"a": 1}'), ("f", "{}")))
        self.split_everywhere(text)

    def test_ids_have_nine_letters_and_digits(self) -> None:
        parser = self.make()
        parser.parse("[TOOL_CALLS]f[CALL_ID]abCD12345[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
        first, second = parser.call_id(0, "f"), parser.call_id(1, "f")
        assert first == "abCD12345"
        assert second is not None
        assert len(second.encode()) == 9
        assert second.isalnum()
        assert second == parser.call_id(1, "f")


class TestDeepSeekV3(ToolCallParserConformance):
    parser: type[ToolCallParser] = DeepSeekV3ToolParser
    alphabet = DeepSeekV3ToolParser.opens + DeepSeekV3ToolParser.closes
    broken: ClassVar[Sequence[str]] = (
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>nothing",
        "<｜tool▁call▁begin｜>add<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a b\n```json\n{}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n[]\n```<｜tool▁call▁end｜>",
    )

    def write_call(self, name: str, arguments: str) -> str:
        return self.write_calls([(name, arguments)])

    def write_one(self, name: str, arguments: str) -> str:
        return (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
            "<｜tool▁call▁end｜>"
        )

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        calls_text = "\n".join(self.write_one(*call) for call in calls)
        return f"<｜tool▁calls▁begin｜>{calls_text}<｜tool▁calls▁end｜>"


class TestDeepSeekV31(TestDeepSeekV3):
    parser = DeepSeekV31ToolParser
    broken = (
        "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>add{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>1<｜tool▁call▁end｜>",
    )

    def write_one(self, name: str, arguments: str) -> str:
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


class TestKimiK2(ToolCallParserConformance):
    parser = KimiK2ToolParser
    alphabet = (
        *KimiK2ToolParser.opens,
        *KimiK2ToolParser.closes,
        "functions.add:0",
        "<|tool_call_argument_begin|>",
    )
    broken = (
        "<|tool_calls_section_begin|><|tool_calls_section_end|>",
        "<|tool_call_begin|>functions.add:0{}<|tool_call_end|>",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>1<|tool_call_end|>",
        "<|tool_call_begin|>:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    )

    def write_call(self, name: str, arguments: str) -> str:
        return self.write_calls([(name, arguments)])

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        calls_text = "".join(
            f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
            "<|tool_call_end|>"
            for index, (name, arguments) in enumerate(calls)
        )
        return f"<|tool_calls_section_begin|>{calls_text}<|tool_calls_section_end|>"

    def test_ids_are_the_models_own(self) -> None:
        parser = self.make()
        parser.parse(self.write_calls([("add", "{}"), ("run", "{}")]).replace(":1", ":7"))
        assert parser.call_id(0, "add") == "functions.add:0"
        assert parser.call_id(1, "run") == "functions.run:7"
        assert parser.call_id(2, "run") == "functions.run:2"


class Parameters(ToolCallParserConformance):
    """Formats that write each parameter as bare text."""

    before_calls, after_calls = "", ""
    call = "{name}{parameters}"
    parameter = "{key}{value}"

    def write_one(self, name: str, arguments: str) -> str:
        parameters = "".join(
            self.parameter.format(key=key, value=value(parsed))
            for key, parsed in json.loads(arguments).items()
        )
        return self.call.format(name=name, parameters=parameters)

    def write_call(self, name: str, arguments: str) -> str:
        return self.write_calls([(name, arguments)])

    def write_forced(self, calls: Sequence[tuple[str, str]]) -> str:
        form = self.parser.format  # type: ignore[attr-defined]
        if not form.alone:
            return self.write_calls(calls)
        return "\n".join(self.write_call(*call) for call in calls)

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        written = "\n".join(self.write_one(*call) for call in calls)
        return self.before_calls + written + self.after_calls


class TestQwen3Xml(Parameters):
    parser = Qwen3XmlToolParser
    before_calls, after_calls = "<tool_call>\n", "\n</tool_call>"
    call = "<function={name}>\n{parameters}</function>"
    parameter = "<parameter={key}>\n{value}\n</parameter>\n"
    alphabet = ("<tool_call>", "</tool_call>", "<function=", "<parameter=", "</parameter>", ">")
    broken = (
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=add",
        "<tool_call><function=a b></function></tool_call>",
        "<function=add>nothing</function>",
    )

    def test_one_new_line_on_each_side_belongs_to_the_format(self) -> None:
        text = "<function=add><parameter=text>\n\n x \n</parameter></function>"
        assert self.read([text]) == ("", called(("add", '{"text": "\\n x "}')))

    def test_a_section_for_each_call(self) -> None:
        one = (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        )
        assert self.read([one + "\n" + one]) == ("", called(*[("add", '{"a": 1}')] * 2))
        self.split_everywhere("Hi " + one + "\n" + one)

    def test_the_end_of_a_value_within_a_string_of_json_is_text(self) -> None:
        tools = [{"function": {"name": "f", "parameters": {"properties": {
            "list": {"type": "array"}, "text": {"type": "string"}}}}}]  # fmt: skip
        text = (
            '<function=f><parameter=list>\n["</parameter>\\"", "</parameter></function>"]\n'
            "</parameter><parameter=text>x</parameter></function>"
        )
        expected = {"list": ['</parameter>"', "</parameter></function>"], "text": "x"}
        for pieces in ([text], list(text)):
            parser = Qwen3XmlToolParser(tools)
            deltas = [*map(parser.feed, pieces), parser.finish()]
            arguments = "".join(c.arguments for delta in deltas for c in delta.tool_calls)
            assert json.loads(arguments) == expected
        broken = '<function=f><parameter=list>["a, 1</parameter></function>'
        assert self.parser(tools).parse(broken) == ("", called(("f", "")))

    def test_a_value_that_is_cut_off_is_not_given(self) -> None:
        text = "<function=add><parameter=a>1</parameter><parameter=text>lon"
        assert self.read([text]) == ("", called(("add", '{"a": 1')))


class TestSeedOss(Parameters):
    parser = SeedOssToolParser
    before_calls, after_calls = "<seed:tool_call>\n", "\n</seed:tool_call>"
    call = "<function={name}>\n{parameters}</function>"
    parameter = "<parameter={key}>{value}</parameter>\n"
    alphabet = ("<seed:tool_call>", "</seed:tool_call>", "<function=", "</parameter>")
    broken = ("<seed:tool_call>nothing</seed:tool_call>", "<seed:tool_call><function=>")


class TestMiniMaxM2(Parameters):
    parser = MiniMaxM2ToolParser
    before_calls, after_calls = "<minimax:tool_call>\n", "\n</minimax:tool_call>"
    call = '<invoke name="{name}">\n{parameters}</invoke>'
    parameter = '<parameter name="{key}">{value}</parameter>\n'
    alphabet = ("<minimax:tool_call>", '<invoke name="', "</invoke>", '<parameter name="', '">')
    broken = ("<minimax:tool_call>nothing", '<minimax:tool_call><invoke name="">')


class TestDeepSeekV32(Parameters):
    parser = DeepSeekV32ToolParser
    before_calls, after_calls = "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"
    alphabet = (before_calls, '<｜DSML｜invoke name="', '" string="true">', '" string="', '">')
    broken = ("<｜DSML｜function_calls>no", '<｜DSML｜function_calls><｜DSML｜invoke name="">')

    def write_one(self, name: str, arguments: str) -> str:
        parameters = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(parsed, str)).lower()}">'
            f"{value(parsed)}</｜DSML｜parameter>\n"
            for key, parsed in json.loads(arguments).items()
        )
        return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>'

    def test_the_format_says_what_is_a_string(self) -> None:
        text = self.before_calls + self.write_one("f", '{"x": "5", "y": 5}') + self.after_calls
        assert self.read([text]) == ("", called(("f", '{"x": "5", "y": 5}')))


class TestStep3(Parameters):
    parser = Step3ToolParser
    before_calls, after_calls = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    call = (
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{parameters}'
        "</steptml:invoke><｜tool_call_end｜>"
    )
    parameter = '<steptml:parameter name="{key}">{value}</steptml:parameter>'
    alphabet = (
        before_calls,
        "<｜tool_call_begin｜>",
        "function",
        "<｜tool_sep｜>",
        "</steptml:invoke>",
    )
    broken = ("<｜tool_calls_begin｜>no", "<｜tool_call_begin｜>function<｜tool_sep｜>add")


class TestGlm45(Parameters):
    parser = Glm45ToolParser
    call = "<tool_call>{name}\n{parameters}</tool_call>"
    parameter = "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    alphabet = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "add\n")
    broken = (
        "<tool_call></tool_call>",
        "<tool_call>not a name\n</tool_call>",
        '<tool_call>{"name": "add"}</tool_call>',
        "<tool_call>add\nnothing</tool_call>",
    )

    def test_the_new_line_and_the_parameters_may_be_missing(self) -> None:
        text = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        assert self.read([text]) == ("", called(("add", '{"a": 1}')))
        assert self.read(["<tool_call>f</tool_call>"]) == ("", called(("f", "{}")))
        self.split_everywhere(text + "<tool_call>f</tool_call>")


class TestPythonic(ToolCallParserConformance):
    parser: type[ToolCallParser] = PythonicToolParser
    before, after = "<|python_tag|>[", "]"
    alphabet: ClassVar[Sequence[str]] = (
        "<|python_tag|>",
        "[add(",
        "a=1",
        ")",
        ", ",
        "'",
        "=",
        "None",
    )
    broken: ClassVar[Sequence[str]] = (
        "<|python_tag|>[]",
        "<|python_tag|>[1, 2]",
        "<|python_tag|>[add(1)]",
        "<|python_tag|>[add (a=1)]",
        "<|python_tag|>[add]",
        "<|python_tag|>add(a=1)",
        "<|python_tag|>[(a=1)]",
        "<|python_tag|>[add(**x)]",
    )

    def write_call(self, name: str, arguments: str) -> str:
        return self.write_calls([(name, arguments)])

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        return (
            self.before + self.separator.join(self.write_one(*call) for call in calls) + self.after
        )

    separator = ", "

    def write_one(self, name: str, arguments: str) -> str:
        values = json.loads(arguments)
        return f"{name}({', '.join(f'{key}={parsed!r}' for key, parsed in values.items())})"

    def test_nothing_is_evaluated(self) -> None:
        for text in ("[add(a=__import__('os'))]", "[add(a=1+1)]", "[add(a=f())]", "[add(a=x)]"):
            _, calls = self.read([self.before[:-1] + text])
            assert [call.arguments for call in calls] in ([], [""]), text


class TestPythonicBare(TestPythonic):
    def test_bare_at_the_beginning(self) -> None:
        text = " [add(a=[1, {\"b\": None}], text='it\\'s'), look_up()]"
        assert self.read([text]) == (
            "",
            called(("add", '{"a": [1, {"b": null}], "text": "it\'s"}'), ("look_up", "{}")),
        )
        self.split_everywhere(text)
        assert self.read(["So:" + text]) == ("So:" + text, [])

    @pytest.mark.parametrize("text", ["[1] Smith (2020)", "[see](url)", "[a, b]", "[x(y)]"])
    def test_prose_in_brackets_is_content(self, text: str) -> None:
        assert self.read([text]) == (text, [])


class TestLlama4Pythonic(TestPythonic):
    parser = Llama4PythonicToolParser
    before, after = "<|python_start|>[", "]<|python_end|>"
    alphabet = ("<|python_start|>", "<|python_end|>", "[add(", "a=1", ")", ", ")
    broken = ("<|python_start|>[]<|python_end|>", "<|python_start|>[add(1)]<|python_end|>")


class TestOlmo3(TestPythonic):
    parser = Olmo3ToolParser
    before, after, separator = "<function_calls>", "</function_calls>", "\n"
    alphabet = ("<function_calls>", "</function_calls>", "add(", "a=1", ")", "\n")
    broken = ("<function_calls></function_calls>", "<function_calls>add(1)</function_calls>")

    def test_words_of_json_and_python(self) -> None:
        text = "<function_calls>f(a=true, b=True, c=null, d=None)</function_calls>"
        assert self.read([text])[1] == called(("f", '{"a": true, "b": true, "c": null, "d": null}'))


class TestFunctionGemma(ToolCallParserConformance):
    parser = FunctionGemmaToolParser
    alphabet = ("<start_function_call>", "call:add{", "<escape>", "<end_function_call>", "a:1")
    broken = (
        "<start_function_call>nothing<end_function_call>",
        "<start_function_call>call:<end_function_call>",
        "<start_function_call>call:add<end_function_call>",
        "<start_function_call>call: {}<end_function_call>",
    )

    def write_value(self, parsed: Any) -> str:
        if isinstance(parsed, str):
            return f"<escape>{parsed}<escape>"
        if isinstance(parsed, dict):
            return "{" + ",".join(f"{k}:{self.write_value(v)}" for k, v in parsed.items()) + "}"
        if isinstance(parsed, list):
            return "[" + ",".join(map(self.write_value, parsed)) + "]"
        return json.dumps(parsed)

    def write_call(self, name: str, arguments: str) -> str:
        body = self.write_value(json.loads(arguments))
        return f"<start_function_call>call:{name}{body}<end_function_call>"


class TestOpenAI(ToolCallParserConformance):
    parser = OpenAIToolParser
    alphabet = (
        "<|start|>assistant", "<|channel|>", "final", "analysis", "commentary to=functions.add",
        "<|message|>", "<|end|>", "<|call|>", "<|constrain|>json",
    )  # fmt: skip
    broken = ("<|channel|>", "<|channel|>final", "<|start|>assistant", "<|channel|>" + "x" * 2000)
    forces_one = True

    def write_call(self, name: str, arguments: str) -> str:
        return (
            f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
            f"<|message|>{arguments}<|call|>"
        )

    def test_random_texts_in_random_pieces(self) -> None:
        """Messages to the user lose their marks, so only cuts are looked at here."""
        seeded = random.Random(0)
        parts = [*self.alphabet, self.write_call("add", '{"a": 1}'), '{"a": ', "1}", "text", " "]
        for _ in range(NUM_SPLITS):
            text = "".join(seeded.choices(parts, k=seeded.randint(0, 9)))
            cuts = sorted(seeded.randint(0, len(text)) for _ in range(seeded.randint(1, 12)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
            assert self.read(pieces) == self.read([text]), pieces

    def test_channels(self) -> None:
        text = (
            "<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look. <|end|>"
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
        )
        for pieces in ([text], list(text)):
            parser = self.make()
            deltas = [*map(parser.feed, pieces), parser.finish()]
            assert "".join(delta.reasoning for delta in deltas) == "Hm."
            assert "".join(delta.content for delta in deltas) == "I look.Done."
        assert self.read([text])[1] == called(("f", "{}"))

    def test_a_call_without_a_body(self) -> None:
        text = "<|channel|>commentary to=functions.f<|message|><|call|>"
        assert self.read([text]) == ("", called(("f", "{}")))

    def test_a_message_that_is_not_ended(self) -> None:
        text = "<|channel|>final<|message|>One<|start|>assistant<|channel|>final<|message|> two"
        assert self.read([text]) == ("One two", [])
        self.split_everywhere(text)


class TestForced(Lists):
    parser = ForcedToolCallParser
    before, after, member = "[", "]", "parameters"
    # Any name is one: the constraint wrote it.
    broken = ("[]", "{}", "nothing", *(f"[{text}]" for text in BROKEN_OBJECTS if "a b" not in text))

    def test_calls_and_text_keep_their_order(self) -> None:
        text = ' [{"name": "add", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]\n'
        assert self.read([text]) == ("", called(("add", '{"a": 1}'), ("f", "{}")))
        self.split_everywhere(text)

    def test_a_good_call_after_a_broken_one_is_found(self) -> None:
        """Not so: the whole text is the calls."""

    def test_cut_short(self) -> None:
        text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "f", "parameters": {"b": "x'
        assert self.read([text]) == ("", called(("add", '{"a": 1}'), ("f", '{"b": "x')))


def test_a_named_call() -> None:
    for pieces in ([' {"a": 1}\n'], list(' {"a": 1}\n')):
        parser = NamedToolCallParser((), name="add")
        deltas = [*map(parser.feed, pieces), parser.finish()]
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert [call.name for call in calls][:2] in (["add"], ["add", None])
        assert "".join(call.arguments for call in calls) == '{"a": 1}'
        assert not any(delta.content for delta in deltas)


def test_a_named_call_without_any_text_is_a_call() -> None:
    assert NamedToolCallParser((), name="add").parse("") == ("", called(("add", "")))
