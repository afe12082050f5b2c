"""The events of a response: numbered without holes, in the protocol's order.

Each output item is added, grows and is done; one at a time is being written, except that a call
which this server makes is done only when its result is there. Where the run ends early, items that are
open end as ``incomplete``, with their own last events.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from msgspec import Raw

from headrace_server.chat.blocks import Block, BlockChange, BlockStep
from headrace_server.protocols.responses.opaque import sealed
from headrace_server.protocols.responses.toolset import BuiltinTool
from headrace_server.streaming.offload import encoded
from headrace_server.tools.base import ToolResult

Event = dict[str, Any]
Emit = Callable[[Event], None]
"""Takes the next event; its number is set already."""


class Numbering:
    """Makes events with rising numbers, from 0."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.next = 0

    def send(self, kind: str, **fields: Any) -> None:
        number, self.next = self.next, self.next + 1
        self._emit({"type": kind, **fields, "sequence_number": number})


class ItemEvents:
    """Turns the steps of blocks into items and their events.

    Args:
        events: where they go.
        find: name of a call -> the built-in tool, None for the client's functions.
        seals: reasoning comes in an opaque form, too.
    """

    def __init__(
        self,
        events: Numbering,
        find: Callable[[str], BuiltinTool | None],
        *,
        seals: bool = False,
    ) -> None:
        self._events = events
        self._seals = seals
        self._find = find
        self.items: list[dict[str, Any]] = []
        """The output: finished items, and the one that is being written."""
        self.ending = "completed"
        """Status of items that end from now on."""

    def take(self, step: BlockStep) -> None:
        """Spell one step."""
        match step.block.kind:
            case "reasoning":
                self._reasoning(step)
            case "text":
                self._text(step)
            case "call":
                self._call(step)

    # Reasoning

    def _reasoning(self, step: BlockStep) -> None:
        position = step.block.position
        match step.change:
            case BlockChange.OPEN:
                item = _item("rs", "reasoning", summary=[], content=[], encrypted_content=None)
                self._added(position, item)
                self._part("response.reasoning_part.added", position, _reasoning_part(""))
            case BlockChange.GROW:
                self._on_part("response.reasoning_text.delta", position, delta=step.text)
            case BlockChange.CLOSE:
                part = _reasoning_part(step.block.text)
                self.items[position]["content"] = [part]
                if self._seals:
                    self.items[position]["encrypted_content"] = sealed(step.block.text)
                self._on_part("response.reasoning_text.done", position, text=part["text"])
                self._part("response.reasoning_part.done", position, part)
                self._done(position)

    # Text

    def _text(self, step: BlockStep) -> None:
        position = step.block.position
        match step.change:
            case BlockChange.OPEN:
                self._added(position, _item("msg", "message", role="assistant", content=[]))
                self._part("response.content_part.added", position, _text_part("", []))
            case BlockChange.GROW:
                entries = logprob_entries(step.logprobs)
                self._on_part(
                    "response.output_text.delta", position, delta=step.text, logprobs=entries
                )
            case BlockChange.CLOSE:
                part = _text_part(step.block.text, logprob_entries(step.block.logprobs))
                self.items[position]["content"] = [part]
                self._on_part(
                    "response.output_text.done", position,
                    text=part["text"], logprobs=part["logprobs"],
                )  # fmt: skip
                self._part("response.content_part.done", position, part)
                self._done(position)

    # Calls

    def _call(self, step: BlockStep) -> None:
        builtin = self._find(step.block.name)
        if builtin is None:
            self._function_call(step)
        else:
            self._builtin_call(step, builtin)

    def _function_call(self, step: BlockStep) -> None:
        block = step.block
        match step.change:
            case BlockChange.OPEN:
                item = _item(
                    "fc", "function_call", call_id=block.call_id, name=block.name, arguments=""
                )
                self._added(block.position, item)
            case BlockChange.GROW:
                self._on_item(
                    "response.function_call_arguments.delta", block.position, delta=step.text
                )
            case BlockChange.CLOSE:
                self.items[block.position]["arguments"] = block.text
                self._on_item(
                    "response.function_call_arguments.done", block.position,
                    name=block.name, arguments=block.text,
                )  # fmt: skip
                self._done(block.position)

    def _builtin_call(self, step: BlockStep, builtin: BuiltinTool) -> None:
        """Everything but the result, for which see :meth:`result`."""
        position, family = step.block.position, builtin.family
        pieces = _PIECES.get(family)
        match step.change:
            case BlockChange.OPEN:
                self._added(position, _builtin_item(builtin))
                self._on_item(f"response.{family}.in_progress", position)
            case BlockChange.GROW:
                if pieces is not None:
                    self._on_item(f"response.{pieces[0]}.delta", position, delta=step.text)
            case BlockChange.CLOSE:
                if pieces is not None:
                    whole = {pieces[1]: step.block.text}
                    self.items[position].update(whole)
                    self._on_item(f"response.{pieces[0]}.done", position, **whole)
                else:
                    self.items[position]["action"] = _action(builtin.tool, step.block.text)
                if family in _WORKING:
                    self._on_item(f"response.{family}.{_WORKING[family]}", position)

    def result(self, block: Block, builtin: BuiltinTool, result: ToolResult) -> None:
        """A built-in tool has answered."""
        item, family = self.items[block.position], builtin.family
        item["status"] = "failed" if result.failed else "completed"
        if family == "mcp_call":
            item["output"] = None if result.failed else result.text
            item["error"] = {"type": "mcp_tool_execution_error", "content": [
                {"type": "text", "text": result.text}]} if result.failed else None  # fmt: skip
        elif family == "code_interpreter_call" and not result.failed:
            item["outputs"] = [{"type": "logs", "logs": result.text}]
        ended = "failed" if result.failed and family == "mcp_call" else "completed"
        self._on_item(f"response.{family}.{ended}", block.position)
        self._done(block.position, item["status"])

    def give_up(self) -> None:
        """End the calls of built-in tools that still wait for a result: there will be none."""
        for position, item in enumerate(self.items):
            if item["status"] == "in_progress":
                self._done(position, "incomplete")

    # Events

    def _added(self, position: int, item: dict[str, Any]) -> None:
        assert position == len(self.items), "items are numbered in order"
        self.items.append(item)
        self._events.send("response.output_item.added", output_index=position, item=dict(item))

    def _done(self, position: int, status: str | None = None) -> None:
        item = self.items[position]
        item["status"] = status or self.ending
        self._events.send("response.output_item.done", output_index=position, item=dict(item))

    def _part(self, kind: str, position: int, part: dict[str, Any]) -> None:
        self._on_part(kind, position, part=part)

    def _on_part(self, kind: str, position: int, **fields: Any) -> None:
        self._on_item(kind, position, content_index=0, **fields)

    def _on_item(self, kind: str, position: int, **fields: Any) -> None:
        item_id = self.items[position]["id"]
        self._events.send(kind, item_id=item_id, output_index=position, **fields)


_PIECES = {
    "mcp_call": ("mcp_call_arguments", "arguments"),
    "code_interpreter_call": ("code_interpreter_call_code", "code"),
}
_WORKING = {"web_search_call": "searching", "code_interpreter_call": "interpreting"}


def new_id(prefix: str) -> str:
    """A random id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def logprob_entries(entries: tuple[Raw, ...] | list[Raw]) -> Any:
    """Log-probabilities as events and items hold them: as JSON, which is made once."""
    return encoded(entries, 256) if entries else []


def _item(prefix: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}


def _builtin_item(builtin: BuiltinTool) -> dict[str, Any]:
    if builtin.family == "web_search_call":
        return _item("ws", "web_search_call", action=_action(builtin.tool, ""))
    if builtin.family == "code_interpreter_call":
        return _item(
            "ci", "code_interpreter_call", code="", container_id=builtin.label, outputs=None
        )
    return _item(
        "mcp", "mcp_call", name=builtin.tool, server_label=builtin.label, arguments="",
        output=None, error=None, approval_request_id=None,
    )  # fmt: skip


def _action(tool: str, arguments: str) -> dict[str, Any]:
    """Action of a browser call, as clients read it."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    if tool == "open":
        return {"type": "open_page", "url": str(given.get("id", given.get("url", "")))}
    if tool == "find":
        pattern, page = str(given.get("pattern", "")), str(given.get("cursor", ""))
        return {"type": "find_in_page", "pattern": pattern, "url": page}
    query = str(given.get("query", ""))
    return {"type": "search", "query": query, "queries": [query]}


def _reasoning_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: Any) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
