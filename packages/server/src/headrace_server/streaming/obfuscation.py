"""Obfuscated streams (``stream_options.include_obfuscation``): the sizes of events say little of their text.

Somebody who sees only the sizes of encrypted packets can guess the tokens of a stream (Weiss et al. 2024,
arXiv:2403.09751). OpenAI's remedy is a field ``obfuscation`` of random characters in each event that
carries new text: https://platform.openai.com/docs/api-reference/chat-streaming.
"""

from __future__ import annotations

import secrets
from contextlib import aclosing

from headrace_server.streaming.event_stream import DirectWriter, Events

STEP = 64
"""Sizes of padded events are multiples of this, in bytes: nearly all tokens come in events of one size."""

_END = b"\n\n"
_FIELD = b',"obfuscation":"%b"}'
_OVERHEAD = len(_FIELD) - len(b"%b") - len(b"}")


async def obfuscated(events: Events) -> Events:
    """The same events, padded."""
    async with aclosing(events):
        async for item in events:
            yield item.then(pad) if isinstance(item, DirectWriter) else pad(item)


def pad(events: bytes) -> bytes:
    """Encoded events, each that carries new text with a further field ``obfuscation``.

    Named events carry text if their names end in ``delta``; all others do.
    """
    if not events:
        return events
    return b"".join(_padded(one) + _END for one in events.removesuffix(_END).split(_END))


def _padded(event: bytes) -> bytes:
    name, _, data = event.rpartition(b"\n")
    if not (data.startswith(b"data: {") and data.endswith(b"}")) or data == b"data: {}":
        return event
    if name and not name.endswith(b"delta"):
        return event
    size = -(len(event) + _OVERHEAD + len(_END)) % STEP
    return event[:-1] + _FIELD % secrets.token_urlsafe(size)[:size].encode()
