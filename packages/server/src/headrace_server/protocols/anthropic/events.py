"""The events and the blocks of Anthropic's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pydantic_core

from headrace_server.chat.blocks import Block, BlockChange, BlockStep
from headrace_server.streaming.event_stream import named_event

STOP_REASONS: Mapping[str, str] = {"stop": "end_turn", "length": "max_tokens"}
PING = named_event("ping", {"type": "ping"})


def encode_step(step: BlockStep) -> bytes:
    """The event of one step."""
    index = step.block.position
    match step.change:
        case BlockChange.OPEN:
            body = {
                "type": "content_block_start",
                "index": index,
                "content_block": _empty(step.block),
            }
        case BlockChange.GROW:
            body = {"type": "content_block_delta", "index": index, "delta": _delta(step)}
        case BlockChange.CLOSE:
            body = {"type": "content_block_stop", "index": index}
    return named_event(str(body["type"]), body)


def whole_block(block: Block) -> dict[str, Any]:
    """A finished block."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text, "citations": None}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case "call":
            return {**_empty(block), "input": parse_input(block.text)}


def parse_input(arguments: str) -> dict[str, Any]:
    """A call's input, an object. Of a call that was cut: its members that are complete, as Anthropic's
    clients read the deltas of a stream, which are the model's own text."""
    try:
        parsed = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _empty(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(step: BlockStep) -> dict[str, Any]:
    match step.block.kind:
        case "text":
            return {"type": "text_delta", "text": step.text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": step.text}
        case "call":
            return {"type": "input_json_delta", "partial_json": step.text}
