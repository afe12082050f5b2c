"""Parsers that the operator chose."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from headrace_core import plugins
from headrace_core.errors import PluginNotFound
from headrace_core.text import ReasoningParser, ToolCallParser
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Parsers:
    """The parser classes that the operator chose; None where there is none."""

    tools: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None


def load_parsers(settings: ServerSettings) -> Parsers:
    """Import the parsers named by the settings; names of a user's file come before installed ones.

    Raises:
        PluginNotFound, PluginLoadError: naming what there is, or the cause.
    """
    tools, reasoning = settings.tool_call_parser, settings.reasoning_parser
    return Parsers(
        _load_tools(tools, settings.tool_parser_plugin) if tools else None,
        _load_reasoning(reasoning, settings.reasoning_parser_plugin) if reasoning else None,
    )


def _load_tools(name: str, file: str | None) -> type[ToolCallParser]:
    if file is None:
        installed: type[ToolCallParser] = plugins.load("headrace.tool_parsers", name)
        return installed
    # pydantic and the adapters are needed only along with a file.
    from headrace_server.parsing.plugin_file import import_file, resolve
    from headrace_server.parsing.vllm_adapters import plug_tools

    own = import_file(file).tools
    return _choose(
        "headrace.tool_parsers", name, file, own, lambda f: plug_tools(name, resolve(name, f))
    )


def _load_reasoning(name: str, file: str | None) -> type[ReasoningParser]:
    if file is None:
        installed: type[ReasoningParser] = plugins.load("headrace.reasoning_parsers", name)
        return installed
    from headrace_server.parsing.plugin_file import import_file, resolve
    from headrace_server.parsing.vllm_adapters import plug_reasoning

    own = import_file(file).reasoning
    return _choose(
        "headrace.reasoning_parsers", name, file, own,
        lambda f: plug_reasoning(name, resolve(name, f)),
    )  # fmt: skip


def _choose(
    group: str,
    name: str,
    file: str,
    own: dict[str, type | tuple[str, str]],
    plug: Callable[[type | tuple[str, str]], T],
) -> T:
    installed = plugins.installed(group)
    if name in own:
        if name in installed:
            logger.warning("%r of %s replaces %s", name, file, installed[name].target)
        return plug(own[name])
    if name in installed:
        found: T = installed[name].load()
        return found
    near = difflib.get_close_matches(name, [*own, *installed], n=3, cutoff=0.75)
    hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    raise PluginNotFound(
        f"no plug-in {name!r} in group {group!r}.{hint} {file} registers: "
        f"{', '.join(own) or 'none'}. Installed: {', '.join(installed) or 'none'}"
    )
