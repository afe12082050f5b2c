"""gpt-oss writes messages: ``<|channel|>commentary to=functions.F<|message|>{...}<|call|>``.

A message has a header (role, recipient, channel, type of content) and a body, which ends with
``<|end|>``, ``<|call|>`` or ``<|return|>``, or with the next message. The format is described in
OpenAI's "harmony response format". Text outside of any message is content.
"""

from __future__ import annotations

from dataclasses import dataclass

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
OPENS = (START, CHANNEL)
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MAX_HEADER = 1024
"""Characters of a header; longer text is not a message."""


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a message."""

    channel: str = ""
    recipient: str = ""
    """Recipient: ``functions.F``, or a built-in tool; "" for a message to the user."""

    @property
    def is_reasoning(self) -> bool:
        """Neither for the user nor for a tool."""
        return self.channel == "analysis" and not self.recipient

    @property
    def function(self) -> str:
        """The name of the function that is called."""
        return self.recipient.removeprefix("functions.")


def read_header(tag: str, text: str) -> Header:
    """The header whose text stands behind an opening tag."""
    words = (tag + text).replace("<|constrain|>", " ").replace(START, " ")
    role, _, channel = words.partition(CHANNEL)
    names = channel.split()
    recipients = [w.removeprefix("to=") for w in [*role.split(), *names] if w.startswith("to=")]
    first = names[0] if names and not names[0].startswith("to=") else ""
    return Header(first, recipients[0] if recipients else "")
