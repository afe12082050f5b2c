"""Log-probabilities as requests return them: a list of mappings, or flat."""

from __future__ import annotations

from collections.abc import Callable

from headrace_core.output import FlatLogprobs, Logprob, Logprobs
from headrace_core.step import TokenLogprobs

TokenText = Callable[[int], str | None]
"""One token's text; None without a tokenizer."""


def new_logprobs(flat: bool) -> Logprobs:
    """An empty container of the form that a request asked for."""
    return FlatLogprobs() if flat else []


def append_position(into: Logprobs, position: TokenLogprobs, text: TokenText) -> None:
    """Append one position: the chosen (or prompt) token first, then by rank."""
    decoded = [text(token_id) for token_id in position.token_ids]
    if isinstance(into, FlatLogprobs):
        into.append_fast(position.token_ids, position.logprobs, position.ranks, decoded)
        return
    entries: dict[int, Logprob] = {}
    rows = zip(position.token_ids, position.logprobs, position.ranks, decoded, strict=True)
    for token_id, logprob, rank, token in rows:
        entries.setdefault(token_id, Logprob(logprob, rank, token))
    into.append(entries)


def prompt_logprobs(positions: list[TokenLogprobs], flat: bool, text: TokenText) -> Logprobs:
    """Of a whole prompt: nothing for its first token, then one entry per position."""
    found = new_logprobs(flat)
    found.append(None)
    for position in positions:
        append_position(found, position, text)
    return found
