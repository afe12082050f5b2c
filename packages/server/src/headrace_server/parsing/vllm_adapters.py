"""Makes parsers of the core contract from classes of a user's file.

Such classes have one method for whole answers and one for pieces. Which is wanted is known only
when the answer ends or goes on, so the first piece is kept until then. If a method fails, the text
it was given is content, and the failure is in the log; if it asks for tokens, the answer ends with
an error that says so.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headrace_core.errors import PluginLoadError, UnsupportedFeature
from headrace_core.text import (
    AnswerContext,
    ParsedDelta,
    ReasoningParser,
    ToolCallDelta,
    ToolCallParser,
)
from headrace_server.parsing import plugin_file as parser_plugins
from headrace_server.parsing.plugin_file import (
    DeltaMessage,
    NoTokenIds,
    NoTokenizer,
    PluginRequest,
    PluginTool,
)

logger = logging.getLogger(__name__)

_NO_IDS = (NoTokenIds(), NoTokenIds(), NoTokenIds())
_PROBE = {"type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}}


class PluggedToolParser(ToolCallParser):
    """Base of adapters; made by :func:`plug_tools`."""

    plugin: ClassVar[type[parser_plugins.ToolParser]]

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._parser = self.plugin(NoTokenizer())
        self._request = _request(tools)
        self._first: str | None = ""
        """The first piece, until it is known whether others follow; then None."""
        self._text = ""
        self._ids: dict[int, str] = {}

    def call_id(self, index: int, name: str) -> str | None:
        return self._ids.get(index)

    def feed(self, text: str) -> ParsedDelta:
        if not text:
            return ParsedDelta()
        if self._first == "":
            self._first = text
            return ParsedDelta()
        first, self._first = self._first, None
        delta = self._piece(first) if first else ParsedDelta()
        rest = self._piece(text)
        delta.content += rest.content
        delta.tool_calls += rest.tool_calls
        return delta

    def finish(self) -> ParsedDelta:
        if not self._first:
            return ParsedDelta()
        try:
            found = self._parser.extract_tool_calls(self._first, self._request)
        except UnsupportedFeature:
            raise
        except Exception:
            logger.exception("tool-call parser %s failed", self.plugin.__name__)
            return ParsedDelta(content=self._first)
        if not found.tools_called:
            return ParsedDelta(content=found.content or "")
        self._ids = {index: call.id for index, call in enumerate(found.tool_calls)}
        return ParsedDelta(
            found.content or "",
            tool_calls=[
                ToolCallDelta(index, call.function.name, call.function.arguments)
                for index, call in enumerate(found.tool_calls)
            ],
        )

    def _piece(self, text: str) -> ParsedDelta:
        before, self._text = self._text, self._text + text
        try:
            message = self._parser.extract_tool_calls_streaming(
                before, self._text, text, *_NO_IDS, self._request
            )
        except UnsupportedFeature:
            raise
        except Exception:
            logger.exception("tool-call parser %s failed", self.plugin.__name__)
            return ParsedDelta(content=text)
        return ParsedDelta() if message is None else self._delta(message)

    def _delta(self, message: DeltaMessage) -> ParsedDelta:
        delta = ParsedDelta(message.content or "")
        for call in message.tool_calls:
            if call.id:
                self._ids[call.index] = call.id
            function = call.function
            if function is not None:
                delta.tool_calls.append(
                    ToolCallDelta(call.index, function.name, function.arguments or "")
                )
        return delta


class PluggedReasoningParser(ReasoningParser):
    """Base of adapters; made by :func:`plug_reasoning`."""

    plugin: ClassVar[type[parser_plugins.ReasoningParser]]

    def __init__(self, context: AnswerContext | None = None) -> None:
        super().__init__(context)
        variables = self.context.chat_template_kwargs
        self._parser = _make_reasoning(self.plugin, variables)
        self._request = PluginRequest(chat_template_kwargs=variables)
        self._first: str | None = ""
        """As in :class:`PluggedToolParser`."""
        self._text = ""

    def feed(self, text: str) -> ParsedDelta:
        if not text:
            return ParsedDelta()
        if self._first == "":
            self._first = text
            return ParsedDelta()
        first, self._first = self._first, None
        delta = self._piece(first) if first else ParsedDelta()
        rest = self._piece(text)
        return ParsedDelta(delta.content + rest.content, delta.reasoning + rest.reasoning)

    def finish(self) -> ParsedDelta:
        if not self._first:
            return ParsedDelta()
        try:
            reasoning, content = self._parser.extract_reasoning(self._first, self._request)
        except UnsupportedFeature:
            raise
        except Exception:
            logger.exception("reasoning parser %s failed", self.plugin.__name__)
            return ParsedDelta(content=self._first)
        return ParsedDelta(content or "", reasoning or "")

    def _piece(self, text: str) -> ParsedDelta:
        before, self._text = self._text, self._text + text
        try:
            message = self._parser.extract_reasoning_streaming(before, self._text, text, *_NO_IDS)
        except UnsupportedFeature:
            raise
        except Exception:
            logger.exception("reasoning parser %s failed", self.plugin.__name__)
            return ParsedDelta(content=text)
        if message is None:
            return ParsedDelta()
        return ParsedDelta(
            message.content or "", message.reasoning or message.reasoning_content or ""
        )


def plug_tools(name: str, plugin: type) -> type[ToolCallParser]:
    """A parser class around a user's.

    Raises:
        PluginLoadError: an object of it cannot be made.
    """
    try:
        asked = plugin(NoTokenizer()).adjust_request(_request([_PROBE]))
    except Exception as error:
        raise _unfit(name, plugin, error) from error
    shown = asked is not None and not asked.skip_special_tokens
    return type(
        plugin.__name__, (PluggedToolParser,), {"plugin": plugin, "needs_special_tokens": shown}
    )


def plug_reasoning(name: str, plugin: type) -> type[ReasoningParser]:
    """A parser class around a user's.

    Raises:
        PluginLoadError: an object of it cannot be made.
    """
    try:
        made = _make_reasoning(plugin, {})
        marker = getattr(made, "end_token", "")
    except Exception as error:
        raise _unfit(name, plugin, error) from error
    marker = marker if isinstance(marker, str) else ""
    # A tag that a class calls a token may be a special one.
    members = {"plugin": plugin, "end_marker": marker, "needs_special_tokens": bool(marker)}
    return type(plugin.__name__, (PluggedReasoningParser,), members)


def _make_reasoning(
    plugin: type[parser_plugins.ReasoningParser], variables: Mapping[str, Any]
) -> parser_plugins.ReasoningParser:
    """With the template's variables, if the class takes them: older ones take a tokenizer only."""
    parameters = inspect.signature(plugin).parameters.values()
    takes = any(
        p.name == "chat_template_kwargs" or p.kind is inspect.Parameter.VAR_KEYWORD
        for p in parameters
    )
    return plugin(NoTokenizer(), **({"chat_template_kwargs": variables} if takes else {}))


def _unfit(name: str, plugin: type, error: Exception) -> PluginLoadError:
    return PluginLoadError(
        f"parser {name!r} ({plugin.__module__}.{plugin.__name__}): no object of it could be made: "
        f"{type(error).__name__}: {error}"
    )


def _request(tools: Sequence[Mapping[str, Any]]) -> PluginRequest:
    wrapped = [tool if "function" in tool else {"function": tool} for tool in tools]
    return PluginRequest([PluginTool.model_validate(tool) for tool in wrapped])
