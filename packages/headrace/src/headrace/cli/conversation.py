"""A conversation in the terminal: its turns, and how many fit into the model's context."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.cli.attachments import Attachment

Message = dict[str, Any]


@dataclass(slots=True)
class AnswerReport:
    """Facts about an answer; a model fills them in while it streams the text."""

    num_tokens: int | None = None
    """Tokens of prompt and answer together; None: the model did not say."""
    finish_reason: str | None = None
    """None: the answer was not finished."""


@dataclass(slots=True)
class Turn:
    """A question and its answer."""

    question: str
    answer: str
    num_tokens: int = 0
    """Tokens that the turn added to the context; 0: unknown."""
    attached: tuple[Attachment, ...] = ()

    def messages(self) -> list[Message]:
        """The turn as chat messages."""
        return [
            question_message(self.question, self.attached),
            {"role": "assistant", "content": self.answer},
        ]


def question_message(question: str, attached: Sequence[Attachment]) -> Message:
    """A question as a chat message; what goes with it comes first."""
    if not attached:
        return {"role": "user", "content": question}
    parts = [each.part for each in attached]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


@dataclass(slots=True)
class Conversation:
    """The turns of a chat so far.

    Args:
        system: first message, in the system role.
        context: tokens that the model's context holds; None: unknown.
    """

    system: str | None = None
    context: int | None = None
    turns: list[Turn] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens of all turns, as far as the model counted them."""
    attached: list[Attachment] = field(default_factory=list)
    """What goes with the next question."""

    def messages(self, question: str | None = None) -> list[Message]:
        """The conversation as chat messages, with a new question at its end."""
        said: list[Message] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        for turn in self.turns:
            said += turn.messages()
        if question is not None:
            said.append(question_message(question, self.attached))
        return said

    def attachment_at(self, message: int, part: int) -> Attachment | None:
        """What :meth:`messages` has as a content part; None: it is not an attached file."""
        turn, is_answer = divmod(message - bool(self.system), 2)
        if is_answer or not 0 <= turn <= len(self.turns):
            return None
        files = self.turns[turn].attached if turn < len(self.turns) else self.attached
        return files[part] if part < len(files) else None

    def add(self, question: str, answer: str, report: AnswerReport) -> None:
        """Append a turn, answered in full or in part, with what was attached to its question."""
        grown = 0
        if report.num_tokens is not None:
            grown = max(0, report.num_tokens - self.num_tokens)
            self.num_tokens = report.num_tokens
        self.turns.append(Turn(question, answer, grown, tuple(self.attached)))
        self.attached.clear()

    def make_room(self, num_tokens: int) -> int:
        """Drop the oldest turns until so many tokens fit besides the others; returns how many turns."""
        dropped = 0
        while self.context and self.num_tokens + num_tokens > self.context and self.drop_oldest():
            dropped += 1
        return dropped

    def drop_oldest(self) -> bool:
        """Drop the oldest turn; False if there is none."""
        if not self.turns:
            return False
        self.num_tokens = max(0, self.num_tokens - self.turns.pop(0).num_tokens)
        return True

    def clear(self) -> None:
        """Forget all turns and what is attached; the system message stays."""
        self.turns.clear()
        self.attached.clear()
        self.num_tokens = 0

    def save(self, path: Path) -> None:
        """Write the messages to a new file, as JSON of a request's field ``messages``.

        Raises:
            OSError: the file exists, or cannot be written.
        """
        with path.open("x", encoding="utf-8") as file:
            json.dump({"messages": self.messages()}, file, ensure_ascii=False, indent=2)
            file.write("\n")
