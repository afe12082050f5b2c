"""Which parsers the operator chose."""

from __future__ import annotations

from dataclasses import dataclass

from headrace_core import plugins
from headrace_core.text import ReasoningParser, ToolCallParser
from headrace_server.settings import ServerSettings


@dataclass(frozen=True)
class Parsers:
    """The parser classes that the operator chose; None where there is none."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None


def load_parsers(settings: ServerSettings) -> Parsers:
    """Import the parsers named by the settings.

    Raises:
        PluginNotFound, PluginLoadError: naming what is installed, or the cause.
    """
    tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
    return Parsers(
        plugins.load("headrace.tool_parsers", tools) if tools else None,
        plugins.load("headrace.reasoning_parsers", reasoning) if reasoning else None,
    )
