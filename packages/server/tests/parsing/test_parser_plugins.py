"""Parsers from users' files, and the list of installed ones."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from headrace_core import plugins
from headrace_core.errors import (
    ConfigError,
    PluginLoadError,
    PluginNotFound,
    UnsupportedFeature,
)
from headrace_core.text import ReasoningParser, ToolCallParser
from headrace_server.parsing.plugin_file import ToolParserManager
from headrace_server.parsing.registry import load_parsers
from headrace_server.settings import ServerSettings
from headrace_testing.fakes.engine import FakeEngine
from headrace_testing.parsers.reasoning import ReasoningParserConformance
from headrace_testing.parsers.tool_calls import ToolCallParserConformance

ROOT = Path(__file__).parents[4]

TOOLS_FILE = '''
import json
from headrace_server.parsing.plugin_file import (
    DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall,
    ToolCall, ToolParser, ToolParserManager,
)
from headrace_server.tool_parsers.formats.hermes import HermesToolParser


@ToolParserManager.register_module(["mine", "also_mine"])
class Mine(ToolParser):
    """Hermes, by the methods that vLLM's parsers have."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.inner = HermesToolParser()

    def adjust_request(self, request):
        assert request.tools[0].function.name
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output, request):
        content, calls = self.inner.parse(model_output)
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[
                ToolCall(type="function",
                         function=FunctionCall(name=c.name, arguments=c.arguments))
                for c in calls
            ],
            content=content,
        )

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text,
                                     previous_token_ids, current_token_ids, delta_token_ids,
                                     request):
        assert current_text == previous_text + delta_text
        delta = self.inner.feed(delta_text)
        if not delta.content and not delta.tool_calls:
            return None
        return DeltaMessage(
            content=delta.content,
            tool_calls=[
                DeltaToolCall(
                    index=c.index,
                    function=DeltaFunctionCall(
                        name=c.name, arguments=c.arguments
                    ).model_dump(exclude_none=True),
                )
                for c in delta.tool_calls
            ],
        )


class Raises(ToolParser):
    pass


class Greedy(ToolParser):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.start = self.vocab["<tool_call>"]


ToolParserManager.register_module(name="raises", module=Raises)
ToolParserManager.register_module("greedy", module=Greedy)
ToolParserManager.register_lazy_module("lazy", "headrace_server.parsing.plugin_file", "ToolParser")
ToolParserManager.register_lazy_module("gone", "no_such_module", "Parser")
'''

REASONING_FILE = '''
from headrace_server.parsing.plugin_file import DeltaMessage, ReasoningParser, ReasoningParserManager
from headrace_server.reasoning_parsers.formats.deepseek_r1 import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("mine")
class Mine(ReasoningParser):
    """DeepSeek R1, by the methods that vLLM's parsers have."""

    end_token = "</think>"

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.inner = DeepSeekR1ReasoningParser()

    def extract_reasoning(self, model_output, request):
        parser = DeepSeekR1ReasoningParser()
        deltas = [parser.feed(model_output), parser.finish()]
        reasoning = "".join(d.reasoning for d in deltas)
        return reasoning or None, "".join(d.content for d in deltas) or None

    def extract_reasoning_streaming(self, previous_text, current_text, delta_text,
                                    previous_token_ids, current_token_ids, delta_token_ids):
        delta = self.inner.feed(delta_text)
        if not delta.content and not delta.reasoning:
            return None
        return DeltaMessage(content=delta.content, reasoning=delta.reasoning)
'''


LOOKS_FILE = """
from headrace_server.parsing.plugin_file import ToolParser, ToolParserManager

@ToolParserManager.register_module("looks")
class Looks(ToolParser):
    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text,
                                     previous_token_ids, current_token_ids, delta_token_ids,
                                     request):
        LOOK
"""


def load_tools(tmp_path: Path, name: str, text: str = TOOLS_FILE) -> type[ToolCallParser]:
    file = tmp_path / "my_parsers.py"
    file.write_text(text)
    settings = ServerSettings(
        enable_auto_tool_choice=True, tool_call_parser=name, tool_parser_plugin=str(file)
    )
    tools = load_parsers(settings).tools
    assert tools is not None
    return tools


def load_reasoning(tmp_path: Path, name: str) -> type[ReasoningParser]:
    file = tmp_path / "my_reasoning.py"
    file.write_text(REASONING_FILE)
    settings = ServerSettings(reasoning_parser=name, reasoning_parser_plugin=str(file))
    reasoning = load_parsers(settings).reasoning
    assert reasoning is not None
    return reasoning


class TestPluggedHermes(ToolCallParserConformance):
    """A user's class that reproduces hermes passes the suite.

    What the last piece holds back is lost: such classes have no method for the end.
    """

    broken = ("<tool_call>{}</tool_call>.", "<tool_call>nothing</tool_call>.")
    alphabet = ("<tool_call>", "</tool_call>")

    @pytest.fixture(autouse=True)
    def _load(self, tmp_path: Path) -> None:
        type(self).parser = load_tools(tmp_path, "mine")

    def write_call(self, name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def read(self, pieces: Any) -> Any:
        """With a last piece that leaves nothing held back, as an end-of-turn token would."""
        pieces = [*pieces]
        content, calls = super().read([*pieces, "\n|"])
        content = content.removesuffix("|").removesuffix("\n")
        return (content.rstrip() if calls else content), calls

    def test_parse_equals_pieces(self) -> None:
        text = self.write_call("add", "{}")
        assert self.make().parse(text) == self.read(list(text))

    def test_a_truncated_call_is_content_or_a_beginning(self) -> None:
        """A class for text in pieces cannot know that a call was cut off."""

    def test_random_texts_in_random_pieces(self) -> None:
        """Random ends are held back for ever."""

    def test_time_is_linear(self) -> None:
        """The shape of the methods makes it quadratic: each piece comes with all before it."""

    def test_it_asks_for_special_tokens(self) -> None:
        assert self.parser.needs_special_tokens

    def test_ids_are_the_plug_ins(self) -> None:
        parser = self.make()
        parser.parse(self.write_call("add", "{}"))
        assert str(parser.call_id(0, "add")).startswith("chatcmpl-tool-")


class TestPluggedDeepSeekR1(ReasoningParserConformance):
    golden = (
        ("<think>why</think>so", "why", "so"),
        ("why</think>so", "why", "so"),
        ("</think>so", "", "so"),
    )

    @pytest.fixture(autouse=True)
    def _load(self, tmp_path: Path) -> None:
        type(self).parser = load_reasoning(tmp_path, "mine")

    def test_every_split_equals_the_whole(self) -> None:
        for text, _, _ in self.golden:
            self.split_everywhere(text)

    def test_random_texts_in_random_pieces(self) -> None:
        """Random ends are held back for ever: such classes have no method for the end."""

    def test_time_is_linear(self) -> None:
        """The shape of the methods makes it quadratic: each piece comes with all before it."""

    def test_it_has_a_mark_for_constraints(self) -> None:
        assert self.parser.end_marker == "</think>"


class TestUsersFiles:
    def test_both_names_work(self, tmp_path: Path) -> None:
        for name in ("mine", "also_mine", "lazy"):
            load_tools(tmp_path, name)

    def test_installed_names_stay(self, tmp_path: Path) -> None:
        assert load_tools(tmp_path, "hermes").__name__ == "HermesToolParser"

    def test_a_name_that_nobody_has(self, tmp_path: Path) -> None:
        with pytest.raises(PluginNotFound, match=r"my_parsers.py registers: mine, .*Installed: "):
            load_tools(tmp_path, "nine")

    @pytest.mark.parametrize(
        ("text", "cause"),
        [
            ("import no_such_module", "ModuleNotFoundError"),
            ("1 / 0", "ZeroDivisionError"),
            ("def", "SyntaxError"),
        ],
    )
    def test_a_file_that_fails(self, tmp_path: Path, text: str, cause: str) -> None:
        with pytest.raises(PluginLoadError, match=rf"my_parsers.py.*{cause}"):
            load_tools(tmp_path, "mine", text)

    def test_a_file_that_is_missing(self) -> None:
        settings = ServerSettings(reasoning_parser="mine", reasoning_parser_plugin="/no/such.py")
        with pytest.raises(PluginLoadError, match=r"/no/such.py.*FileNotFoundError"):
            load_parsers(settings)

    def test_a_lazy_class_that_is_gone(self, tmp_path: Path) -> None:
        with pytest.raises(PluginLoadError, match=r"'gone' \(no_such_module:Parser\)"):
            load_tools(tmp_path, "gone")

    def test_a_class_that_wants_tokens(self, tmp_path: Path) -> None:
        with pytest.raises(PluginLoadError, match=r"greedy.*tokenizer.get_vocab.*get text"):
            load_tools(tmp_path, "greedy")

    def test_a_class_that_looks_into_token_ids(self, tmp_path: Path) -> None:
        for look in ("delta_token_ids[-1]", "len(current_token_ids)", "7 in delta_token_ids",
                     "not previous_token_ids", "list(delta_token_ids)"):  # fmt: skip
            parser = load_tools(tmp_path, "looks", LOOKS_FILE.replace("LOOK", look))()
            parser.feed("a")
            with pytest.raises(UnsupportedFeature, match=r"token ids: .*compare texts"):
                parser.feed("b")

    async def test_who_looks_into_token_ids_ends_the_stream(
        self, connect: Any, tmp_path: Path
    ) -> None:
        file = tmp_path / "my_parsers.py"
        file.write_text(LOOKS_FILE.replace("LOOK", "len(delta_token_ids)"))
        client = connect(
            FakeEngine("Hello."), enable_auto_tool_choice=True, tool_call_parser="looks",
            tool_parser_plugin=str(file),
        )  # fmt: skip
        tool = {"type": "function", "function": {"name": "f"}}
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "stream": True}
        answer = await client.post("/v1/chat/completions", json=body)
        assert "token ids: parser plug-ins get text" in answer.text

    def test_a_method_that_fails(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        parser = load_tools(tmp_path, "raises")
        assert parser().parse("text") == ("text", [])
        made = parser()
        assert [made.feed(piece).content for piece in ("a", "b", "c")] == ["", "ab", "c"]
        assert "tool-call parser Raises failed" in caplog.text

    def test_registering_elsewhere_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"--tool-parser-plugin"):
            ToolParserManager.register_module("x", module=object)

    def test_a_file_needs_a_name(self) -> None:
        with pytest.raises(ConfigError, match=r"tool_parser_plugin.*tool_call_parser"):
            ServerSettings(tool_parser_plugin="x.py")
        with pytest.raises(ConfigError, match=r"reasoning_parser_plugin.*reasoning_parser"):
            ServerSettings(reasoning_parser_plugin="x.py")


class TestRegistry:
    """Each name of the table is there, imports, and stands in help and in the manual."""

    declared: ClassVar[dict[str, dict[str, str]]] = tomllib.loads(
        (ROOT / "packages/server/pyproject.toml").read_text()
    )["project"]["entry-points"]

    def test_names_of_tool_parsers(self) -> None:
        assert set(self.declared["headrace.tool_parsers"]) == {
            "hermes", "mistral", "llama3_json", "llama4_json", "llama4_pythonic", "pythonic",
            "olmo3", "granite", "granite-20b-fc", "internlm", "jamba", "xlam", "deepseek_v3",
            "deepseek_v31", "deepseek_v32", "openai", "kimi_k2", "hunyuan_a13b", "longcat",
            "glm45", "glm47", "minimax", "minimax_m2", "qwen3_xml", "qwen3_coder", "seed_oss",
            "step3", "ernie45", "phi4_mini_json", "functiongemma", "gigachat3",
        }  # fmt: skip

    def test_names_of_reasoning_parsers(self) -> None:
        assert set(self.declared["headrace.reasoning_parsers"]) == {
            "deepseek_r1", "deepseek_v3", "qwen3", "glm45", "holo2", "granite", "hunyuan_a13b",
            "ernie45", "minimax_m2", "minimax_m2_append_think", "kimi_k2", "mistral", "olmo3",
            "seed_oss", "step3", "openai_gptoss",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("group", "kind"),
        [
            ("headrace.tool_parsers", ToolCallParser),
            ("headrace.reasoning_parsers", ReasoningParser),
        ],
    )
    def test_all_import(self, group: str, kind: type) -> None:
        for name, target in self.declared[group].items():
            loaded = plugins.Plugin(group, name, target, "here").load()
            assert issubclass(loaded, kind)
            assert loaded.__doc__
            loaded()

    def test_help_names_all(self) -> None:
        fields = {f.name: f.metadata["help"] for f in _options()}
        for group, option in (
            ("headrace.tool_parsers", "tool_call_parser"),
            ("headrace.reasoning_parsers", "reasoning_parser"),
        ):
            listed = fields[option].partition(": ")[2].partition(", or a plug-in")[0].split(", ")
            assert listed == sorted(self.declared[group])

    @pytest.mark.parametrize(
        ("group", "page"),
        [
            ("headrace.tool_parsers", "tools.md"),
            ("headrace.reasoning_parsers", "reasoning.md"),
        ],
    )
    def test_the_manual_has_a_row_for_each(self, group: str, page: str) -> None:
        text = (ROOT / "docs/serving" / page).read_text(encoding="utf-8")
        rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
        named = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
        assert named >= set(self.declared[group])
        assert {n for n in named if not n.startswith(("-", "<"))} <= set(self.declared[group])


def _options() -> Any:
    import dataclasses

    return dataclasses.fields(ServerSettings)
