"""What the router reads of a request's body: its model, and the text that becomes its prompt."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from headrace_server.router.prefixes import PromptText

PROMPT_FIELDS = (
    "tools",
    "system",
    "instructions",
    "messages",
    "prompt",
    "input",
    "query",
    "documents",
)
"""Fields of all protocols that become part of a prompt, in the order in which templates write them."""
UNREAD_BYTES = 4096
"""Of a body that is no JSON object: bytes that count as its prompt."""


class _Fields(msgspec.Struct):
    """Fields of any protocol; their values stay as they were written."""

    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()


_DECODER = msgspec.json.Decoder(_Fields)


class ReadRequest(NamedTuple):
    """A request, as far as the choice of a server goes."""

    prompt: PromptText
    model: str | None = None
    previous_response_id: str | None = None


def read_request(path: str, body: bytes) -> ReadRequest:
    """Read a body. What cannot be read is for the server to refuse: nothing is raised here."""
    try:
        fields = _DECODER.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return ReadRequest(PromptText(body[:UNREAD_BYTES], path.encode(), path, body))
    text = b"\n".join(bytes(getattr(fields, name)) for name in PROMPT_FIELDS)
    model = _text(fields.model)
    scope = b"\0".join((path.encode(), bytes(fields.model), bytes(fields.cache_salt)))
    prompt = PromptText(text.lstrip(b"\n"), scope, path, body)
    return ReadRequest(prompt, model, _text(fields.previous_response_id))


def _text(value: msgspec.Raw) -> str | None:
    try:
        found = msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError):
        return None
    return found if isinstance(found, str) else None
