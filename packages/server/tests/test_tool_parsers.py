"""Tool-call formats."""

from __future__ import annotations

import pytest

from headrace_core.testing.tool_parser import ToolCallParserConformance
from headrace_core.text import ToolCall
from headrace_server.tool_parsers.hermes import HermesToolParser


@pytest.mark.spec("TOOL-PARSERS")
@pytest.mark.req("SEC-15")
class TestHermes(ToolCallParserConformance):
    parser = HermesToolParser
    alphabet = ("<tool_call>", "</tool_call>", "</tool", '{"name": "x"}', "[", "]")
    broken = (
        "<tool_call></tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call>{]</tool_call>",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1}} x</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 01}}</tool_call>',
        "</tool_call>",
        "<tool_call><tool_call>",
    )

    def write_call(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def test_arguments_keep_their_spelling(self) -> None:
        text = '<tool_call>{"arguments": { "a" :1.50 }, "name": "f"}</tool_call>'
        assert HermesToolParser().parse(text) == ("", [ToolCall("f", '{ "a" :1.50 }')])

    def test_a_closing_tag_inside_a_string_ends_nothing(self) -> None:
        text = self.write_call("run", '{"text": "</tool_call> \\" <tool_call>"}')
        content, calls = self.read(list(text))
        assert (content, len(calls)) == ("", 1)
        assert calls[0].arguments == '{"text": "</tool_call> \\" <tool_call>"}'

    def test_white_space_beside_calls_is_dropped(self) -> None:
        call = self.write_call("add", "{}")
        assert self.read([f"Hi \n{call}\n\n{call}\n"])[0] == "Hi"
        assert self.read([f"Hi \n{call}\n\nthere \n"])[0] == "Hi\n\nthere \n"

    def test_deep_nesting_is_content(self) -> None:
        text = f'<tool_call>{{"name": "f", "arguments": {"[" * 5000}'
        assert self.read([text]) == (text, [])
        closed = text + "]" * 5000 + "}</tool_call>"
        assert self.read([closed]) == (closed, [])
