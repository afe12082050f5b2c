"""What users' parser files import from the meta-package."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace.reasoning
import headrace.tool_parsers
from headrace.cli.serve import make_parser, settings_from
from headrace_core.errors import PluginLoadError
from headrace_server.parsing import plugin_file as parser_plugins
from headrace_server.parsing.registry import load_parsers

FILE = """
from headrace.reasoning import ReasoningParser, ReasoningParserManager
from headrace.tool_parsers import ExtractedToolCallInformation, ToolParser, ToolParserManager

@ToolParserManager.register_module("mine")
class Tools(ToolParser):
    def extract_tool_calls(self, model_output, request):
        return ExtractedToolCallInformation(
            tools_called=False, tool_calls=[], content=model_output.upper()
        )

@ReasoningParserManager.register_module(name="mine")
class Reasoning(ReasoningParser):
    end_token = "!"

    def extract_reasoning(self, model_output, request):
        return tuple(model_output.split("!"))
"""


def test_names_are_the_servers() -> None:
    for module in (headrace.tool_parsers, headrace.reasoning):
        for name in module.__all__:
            assert getattr(module, name) is getattr(parser_plugins, name)


def test_a_file_given_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    words = ["--enable-auto-tool-choice", "--tool-call-parser", "mine", "--tool-parser-plugin",
             str(file), "--reasoning-parser", "mine", "--reasoning-parser-plugin", str(file)]  # fmt: skip
    parsers = load_parsers(settings_from(make_parser().parse_args(words)))
    assert parsers.tools is not None
    assert parsers.tools().parse("text") == ("TEXT", [])
    assert parsers.reasoning is not None
    assert parsers.reasoning.end_marker == "!"
    made = parsers.reasoning()
    made.feed("why!so")
    assert (made.finish().reasoning, parsers.reasoning().feed("").content) == ("why", "")


def test_a_file_that_fails_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_module")
    words = ["--reasoning-parser", "mine", "--reasoning-parser-plugin", str(file)]
    with pytest.raises(PluginLoadError, match=r"broken.py.*no_such_module"):
        load_parsers(settings_from(make_parser().parse_args(words)))
