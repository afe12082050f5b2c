"""Text of a chat that an assistant wrote: the template's ``{% generation %}`` blocks."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import NamedTuple

from headrace_core.errors import RequestError
from headrace_core.request import ChatPrompt
from headrace_engine.input_processing.control_tokens import strings

MARKS = ("\U0001fffe", "\U0001ffff")
"""Written at the beginning and at the end of a block: code points that Unicode keeps from all text."""
_MARK = re.compile("|".join(MARKS))


class Generations(NamedTuple):
    """A rendered chat and its blocks."""

    text: str
    """Without marks."""
    spans: list[tuple[int, int]]
    """First character of each block, and the one behind its last."""

    @classmethod
    def found_in(cls, marked: str) -> Generations:
        """The blocks of a text with :data:`MARKS`.

        Raises:
            RequestError: a block has a beginning or an end only.
        """
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        begun: list[int] = []
        size = start = 0
        for mark in _MARK.finditer(marked):
            index, character = mark.start(), mark[0]
            pieces.append(marked[start:index])
            size += index - start
            start = index + 1
            if character == MARKS[0]:
                begun.append(size)
            elif begun:
                spans.append((begun.pop(), size))
            else:
                raise _torn()
        if begun:
            raise _torn()
        return cls("".join([*pieces, marked[start:]]), spans)


def refuse_marks(chat: ChatPrompt) -> None:
    """Raises: RequestError, the chat holds a mark."""
    held = (chat.messages, chat.tools, chat.documents, chat.chat_template_kwargs)
    for text in strings(held):
        if any(mark in text for mark in MARKS):
            raise RequestError(
                "conversation: must not hold the code points U+1FFFE and U+1FFFF with "
                "return_assistant_tokens_mask = True",
                param="conversation",
            )


def assistant_mask(
    spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]
) -> list[int]:
    """1 for each token that holds a character of a span, and for those between them; else 0.

    Args:
        spans: first character, and the one behind the last.
        offsets: the same of each token.
    """
    mask = [0] * len(offsets)
    for begin, end in spans:
        inside = [i for i, (first, behind) in enumerate(offsets) if first < end and behind > begin]
        if inside:
            mask[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
    return mask


def plain_offsets(
    text: str, guard: str, offsets: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Offsets in a text without its guards."""
    guards = [index for index, character in enumerate(text) if character == guard]
    return [
        (first - bisect.bisect_left(guards, first), behind - bisect.bisect_left(guards, behind))
        for first, behind in offsets
    ]


def _torn() -> RequestError:
    return RequestError(
        "return_assistant_tokens_mask = True: the chat template cuts the text of a {% generation %} block; "
        "the tokens of that block are unknown",
        param="return_assistant_tokens_mask",
    )
