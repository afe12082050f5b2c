"""Log-probabilities in the forms of the wire. Minus infinity is shown as -9999, valid in JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from headrace_core.output import Logprob, PositionLogprobs
from headrace_server.offload import encoded
from headrace_server.protocol.chat import ChunkChatLogprobs, ChunkContentLogprob, ChunkToken
from headrace_server.protocol.completions import ChunkLogprobs, ChunkPromptLogprob

LEAST = -9999.0
_FEW = 32
"""Positions up to which a block is made of objects, which its reader encodes."""


def finite(value: float) -> float:
    """The value, or :data:`LEAST` if it is lower or not a number."""
    return value if value >= LEAST else LEAST


@dataclass(slots=True)
class CompletionFormat:
    """Builds ``logprobs`` of one choice of a completion; keeps the text offset between chunks.

    Args:
        count: likeliest tokens per position.
        as_ids: show tokens as ``token_id:N``.
    """

    count: int
    as_ids: bool
    offset: int = 0

    def build(
        self,
        token_ids: Sequence[int],
        positions: Iterable[PositionLogprobs | None],
        first_text: str = "",
    ) -> ChunkLogprobs:
        """One chunk's entries.

        Args:
            first_text: text of a token without an entry (a prompt's first).
        """
        result = ChunkLogprobs([], [], [], [])
        for token_id, entries in zip(token_ids, positions, strict=True):
            self._append(result, token_id, entries, first_text)
        return result

    def _append(
        self, into: ChunkLogprobs, token_id: int, entries: PositionLogprobs | None, text: str
    ) -> None:
        chosen = entries.get(token_id) if entries else None
        shown = _text(token_id, chosen) if chosen else text
        into.text_offset.append(self.offset)
        self.offset += len(shown)
        into.tokens.append(_shown(token_id, shown, self.as_ids))
        if entries is None or chosen is None:
            into.token_logprobs.append(None)
            into.top_logprobs.append(None)
            return
        into.token_logprobs.append(finite(chosen.logprob))
        top: dict[str, float] = {}
        for other, entry in [(token_id, chosen), *_best(entries, self.count)]:
            name = _shown(other, _text(other, entry), self.as_ids)
            top.setdefault(name, finite(entry.logprob))
        into.top_logprobs.append(top)


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[PositionLogprobs | None],
    count: int,
    as_ids: bool,
) -> ChunkChatLogprobs:
    """``logprobs`` of a chat choice; ``top_logprobs`` holds the ``count`` likeliest."""
    entries = content_logprobs(token_ids, positions, count, as_ids)
    block = ChunkChatLogprobs([])
    if len(token_ids) > _FEW:
        block.content = cast(Any, encoded(entries))
    else:
        block.content.extend(entries)
    return block


def content_logprobs(
    token_ids: Sequence[int],
    positions: Iterable[PositionLogprobs | None],
    count: int,
    as_ids: bool,
) -> Iterator[ChunkContentLogprob]:
    """The entries of :func:`chat_logprobs`, one by one."""
    for token_id, entries in zip(token_ids, positions, strict=True):
        entries = entries or {}
        chosen = _token(token_id, entries.get(token_id) or Logprob(LEAST), as_ids)
        top = [_token(other, entry, as_ids) for other, entry in _best(entries, count)]
        yield ChunkContentLogprob(chosen.token, chosen.logprob, chosen.bytes, top)


def prompt_logprobs(
    positions: Iterable[PositionLogprobs | None],
) -> msgspec.Raw:
    """Per prompt token: id as text -> entry; None for the first. As JSON."""
    return encoded(
        None
        if entries is None
        else {
            str(token_id): ChunkPromptLogprob(finite(e.logprob), e.rank, e.decoded_token)
            for token_id, e in entries.items()
        }
        for entries in positions
    )


def _best(entries: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    if count == 0:
        return []
    ordered = sorted(entries.items(), key=lambda item: -item[1].logprob)
    return ordered if count < 0 else ordered[:count]


def _text(token_id: int, entry: Logprob) -> str:
    return entry.decoded_token if entry.decoded_token is not None else f"token_id:{token_id}"


def _shown(token_id: int, text: str, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else text


def _token(token_id: int, entry: Logprob, as_ids: bool) -> ChunkToken:
    text = _shown(token_id, _text(token_id, entry), as_ids)
    return ChunkToken(text, finite(entry.logprob), list(text.encode("utf-8", "replace")))
