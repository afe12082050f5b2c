"""What one exchange is, and what one training example is: the words shared by all the skills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool call that the assistant should make, and what the tool will say."""

    name: str
    arguments: dict[str, Any]
    result: str


@dataclass(frozen=True)
class Turn:
    """A user's message and the one right answer to it.

    There is exactly one right answer on purpose: greedy decoding is then well defined, and
    evaluation is a comparison of strings instead of a matter of opinion.
    """

    skill: str
    user: str
    answer: str
    thought: str
    calls: tuple[Call, ...] = ()
    call_thought: str = ""


@dataclass
class Dialogue:
    """A conversation, as the arguments of `apply_chat_template` and the skills it shows."""

    turns: list[Turn]
    system: str = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    enable_thinking: bool = False

    @property
    def skill(self) -> str:
        return self.turns[-1].skill

    def messages(self) -> list[Message]:
        """The conversation in OpenAI's shape, ending with the assistant's last answer."""
        messages: list[Message] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.user})
            if turn.calls:
                messages.append(_call_message(turn))
                messages.extend({"role": "tool", "content": call.result} for call in turn.calls)
            messages.append(
                {"role": "assistant", "content": turn.answer, "reasoning_content": turn.thought}
            )
        if not self.enable_thinking:
            for message in messages:
                message.pop("reasoning_content", None)
        return messages


def _call_message(turn: Turn) -> Message:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.calls
    ]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": calls,
        "reasoning_content": turn.call_thought,
    }
