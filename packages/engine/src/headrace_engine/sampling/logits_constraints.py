"""Single tokens that a request constrains: penalties, biases, forbidden tokens, its reasoning's end.

Few requests have any: :class:`LogitsConstraints` is an object of such a request, so that the others cost
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace_core.request import ThinkingBudget
from headrace_core.step import NewRequest
from headrace_engine.structured.matching import RowConstraint

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """Distinct tokens of a text in order of first appearance, with counts: sparse. Adding a token is O(1)."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        tokens = np.asarray(token_ids, np.int64)
        distinct, counts = np.unique(tokens, return_counts=True)
        self._size = len(distinct)
        room = max(16, 2 * self._size)
        self._ids = np.zeros(room, np.int64)
        self._counts = np.zeros(room, np.float32)
        self._ids[: self._size] = distinct
        self._counts[: self._size] = counts
        self._index = {token: i for i, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[n]; a view."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """[n]; a view."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more."""
        i = self._index.get(token_id)
        if i is None:
            i = self._index[token_id] = self._size
            if i == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[i] = token_id
            self._size += 1
        self._counts[i] += 1


class ThinkingLimit:
    """The end of a request's reasoning, forced once the reasoning has used up its budget.

    Tokens are compared, not texts: marks that the model spells with other tokens are not seen, and
    the end is forced in the usual ones.

    Args:
        budget: of the request.
        output: its tokens so far.
    """

    def __init__(self, budget: ThinkingBudget, output: Iterable[int] = ()) -> None:
        self._start, self._end = list(budget.start_token_ids), list(budget.end_token_ids)
        self._left = budget.max_tokens
        self._tail: deque[int] = deque(maxlen=max(len(self._start), len(self._end)))
        self._open = not self._start
        self._closed = False
        for token_id in output:
            self.observe(token_id)

    def observe(self, token_id: int) -> None:
        """The output has grown by a token."""
        if self._closed:
            return
        self._tail.append(token_id)
        if self._ends_with(self._end):
            self._closed = True
        elif self._open:
            self._left -= 1
        elif self._ends_with(self._start):
            self._open = True
            self._tail.clear()

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: any."""
        if self._closed or not self._open or self._left > 0:
            return None
        # What the output ends with may be the beginning of the end: it is not begun again.
        for size in range(len(self._end) - 1, 0, -1):
            if self._ends_with(self._end[:size]):
                return self._end[size]
        return self._end[0]

    def _ends_with(self, tokens: list[int]) -> bool:
        return len(self._tail) >= len(tokens) and list(self._tail)[-len(tokens) :] == tokens


@dataclass(slots=True)
class LogitsConstraints:
    """One request's constraints on single tokens. Absent ones are None or empty."""

    allowed: Ints | None
    """Only these are possible."""
    bad_words: list[list[int]]
    """Token sequences that must not be completed."""
    min_tokens: int
    stop_ids: Ints
    """Impossible before ``min_tokens``."""
    bias_ids: Ints
    bias: npt.NDArray[np.float32]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    output_counts: TokenCounts | None
    """Output tokens and how often; None if no penalty reads it."""
    seen: TokenCounts | None
    """Prompt and output tokens; None without repetition penalty."""
    constraint: RowConstraint | None = None
    """On the form of the output."""
    thinking: ThinkingLimit | None = None

    def fields(self, num_output_tokens: int) -> list[str]:
        """The request's fields that now make tokens impossible, as clients spell them.

        Args:
            num_output_tokens: length of the output so far.
        """
        excludes = {
            "the constraint on the form (structured_outputs, response_format or tools)": (
                self.constraint is not None
            ),
            "allowed_token_ids": self.allowed is not None,
            "bad_words": bool(self.bad_words),
            "min_tokens": num_output_tokens < self.min_tokens and bool(self.stop_ids.size),
            "logit_bias": bool(np.isneginf(self.bias).any()),
        }
        return [name for name, holds in excludes.items() if holds]

    def observe(self, token_id: int) -> None:
        """The request's output has grown by a token."""
        if self.output_counts is not None:
            self.output_counts.add(token_id)
        if self.seen is not None:
            self.seen.add(token_id)
        if self.constraint is not None:
            self.constraint.observe(token_id)
        if self.thinking is not None:
            self.thinking.observe(token_id)


def make_constraints(
    new: NewRequest, vocab_size: int, constraint: RowConstraint | None = None
) -> LogitsConstraints | None:
    """A request's constraints, or None if it has none. Token ids outside the vocabulary are dropped:
    input processing has refused those of the user, and a model's end tokens may lie beyond the logits."""
    params = new.request.params
    counted = params.presence_penalty != 0 or params.frequency_penalty != 0
    repetition = params.repetition_penalty != 1
    stops = params.min_tokens > 0 and bool(new.request.stop_token_ids)
    if not (
        counted
        or repetition
        or stops
        or params.logit_bias
        or params.allowed_token_ids is not None
        or new.request.bad_words_token_ids
        or constraint is not None
        or new.request.thinking is not None
    ):
        return None
    output = new.output_token_ids
    # A prompt of embeddings holds no tokens that could have been seen.
    known = new.token_ids if new.request.prompt_embeds is None else output
    bias = {t: b for t, b in (params.logit_bias or {}).items() if 0 <= t < vocab_size}
    allowed = params.allowed_token_ids
    return LogitsConstraints(
        allowed=None if allowed is None else _ids(allowed, vocab_size),
        bad_words=[
            word for word in new.request.bad_words_token_ids if word and 0 <= word[-1] < vocab_size
        ],
        min_tokens=params.min_tokens,
        stop_ids=_ids(sorted(new.request.stop_token_ids), vocab_size),
        bias_ids=np.fromiter(bias, np.int64, len(bias)),
        bias=np.fromiter(bias.values(), np.float32, len(bias)),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        output_counts=TokenCounts(output) if counted else None,
        seen=TokenCounts(known) if repetition else None,
        constraint=constraint,
        thinking=None
        if new.request.thinking is None
        else ThinkingLimit(new.request.thinking, output),
    )


def _ids(token_ids: Sequence[int], vocab_size: int) -> Ints:
    ids = np.unique(np.asarray(token_ids, np.int64))
    return ids[(ids >= 0) & (ids < vocab_size)]
