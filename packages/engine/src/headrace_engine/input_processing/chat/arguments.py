"""Arguments of past tool calls: JSON text as clients send it back -> the object that templates expect.

A client keeps what it was given. Where an answer was cut (``max_tokens``, a stop), that is the beginning
of JSON, and it comes back with every later turn of the conversation: refusing it would end the
conversation for good.
"""

from __future__ import annotations

import json
from typing import Any

MAX_ARGUMENTS = 1 << 20
"""Characters of one call's arguments: parsing JSON keeps every other thread waiting."""


def arguments_object(text: str | None) -> Any:
    """A call's arguments as an object; ``{}`` for none.

    JSON that was cut gives what had come so far. Text that is not JSON becomes the object's ``input``, as
    the text of OpenAI's custom tools.
    """
    if not text or not text.strip():
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    for candidate in _completions(text):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            return found
    return {"input": text}


def _completions(text: str) -> list[str]:
    """Cut JSON with its ends added: as it stands, and as it was before its last, incomplete member."""
    closers: list[str] = []
    before, in_string, at, escape = "", False, 0, -1
    while at < len(text):
        character = text[at]
        if in_string:
            if character == "\\":
                escape, at = at, at + (6 if text[at + 1 : at + 2] == "u" else 2)
                continue
            in_string = character != '"'
        elif character == '"':
            in_string = True
        elif character in "{[":
            closers.append("}" if character == "{" else "]")
            before = text[: at + 1] + "".join(reversed(closers))
        elif character in "}]":
            if not closers or closers.pop() != character:
                return []
        elif character == ",":
            before = text[:at] + "".join(reversed(closers))
        at += 1
    whole = text[:escape] if at > len(text) else text
    return [whole + '"' * in_string + "".join(reversed(closers)), before]
