"""``context_management``: what a client wants to have dropped from its conversation before it is read.

Old thoughts are dropped. Old results of tools are not: edits that would do so past a number of tokens are
accepted where they cannot apply, and refused by name where they might.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_server.protocols.anthropic.protocol import CountTokensRequest, InputMessage

_FIELD = "context_management"
_THOUGHTS = "clear_thinking_20251015"
_TRIGGERS: Mapping[str, int] = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""Edits that apply past so many input tokens, unless they say otherwise."""
_KEPT_TOOL_USES = 3


def apply_edits(body: CountTokensRequest, max_model_len: int) -> None:
    """Edit the messages as the body asks.

    Args:
        max_model_len: the context, in tokens.

    Raises:
        UnsupportedFeature: an edit might apply that is not supported.
        RequestError: an edit is malformed.
    """
    edits = (body.context_management or {}).get("edits") or []
    if not isinstance(edits, list) or not all(isinstance(edit, dict) for edit in edits):
        raise RequestError(f"{_FIELD}.edits: must be a list of objects", param=_FIELD)
    for index, edit in enumerate(edits):
        where, kind = f"{_FIELD}.edits[{index}]", edit.get("type")
        if kind == _THOUGHTS:
            _clear_thoughts(body.messages, _kept_turns(where, edit.get("keep")))
        elif kind not in _TRIGGERS or _might_apply(where, edit, body.messages, max_model_len):
            raise UnsupportedFeature(
                f"{where}: edits of type {str(kind)[:64]!r} are accepted only if they change nothing; "
                f"leave it out, and remove unwanted content from the messages",
                param=_FIELD,
            )


def _kept_turns(where: str, keep: Any) -> int | None:
    """Number of last turns that keep their thoughts; None: all."""
    if keep is None:
        return 1
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return None
    return _number(f"{where}.keep", keep, "thinking_turns")


def _clear_thoughts(messages: Sequence[InputMessage], keep: int | None) -> None:
    if keep is None:
        return
    thoughtful = [
        message
        for message in messages
        if message.role == "assistant"
        and not isinstance(message.content, str)
        and any(block.type == "thinking" for block in message.content)
    ]
    for message in thoughtful[: len(thoughtful) - keep]:
        assert not isinstance(message.content, str)
        message.content = [block for block in message.content if block.type != "thinking"]


def _might_apply(
    where: str, edit: Mapping[str, Any], messages: Sequence[InputMessage], max_model_len: int
) -> bool:
    num_uses = sum(
        block.type == "tool_use"
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
    )
    if edit["type"] != "compact_20260112":
        keep = edit.get("keep")
        kept = _KEPT_TOOL_USES if keep is None else _number(f"{where}.keep", keep, "tool_uses")
        if num_uses <= kept:
            return False
    trigger = edit.get("trigger")
    if isinstance(trigger, dict) and trigger.get("type") == "tool_uses":
        return num_uses > _number(f"{where}.trigger", trigger, "tool_uses")
    most = _TRIGGERS[edit["type"]]
    if trigger is not None:
        most = _number(f"{where}.trigger", trigger, "input_tokens")
    return most < max_model_len


def _number(where: str, given: Any, kind: str) -> int:
    value = given.get("value") if isinstance(given, dict) and given.get("type") == kind else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise RequestError(f"{where}: must be {{'type': {kind!r}, 'value': NUMBER}}", param=_FIELD)
    return value
