"""Requests as a worker gets them, for tests: :func:`new_request`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import NewRequest


def new_request(
    request_id: str,
    token_ids: Sequence[int],
    block_ids: tuple[list[int], ...] = ([],),
    params: SamplingParams | None = None,
    *,
    num_prompt_tokens: int | None = None,
    num_computed_tokens: int = 0,
    stop_token_ids: Iterable[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    **fields: Any,
) -> NewRequest:
    """A request that a worker does not hold.

    Args:
        token_ids: prompt and output.
        params: None: greedy.
        num_prompt_tokens: the others are output; None: all are the prompt's.
        fields: further ones of :class:`~headrace_core.request.CoreRequest`.
    """
    prompt = list(token_ids[:num_prompt_tokens])
    params = params or SamplingParams(temperature=0.0)
    request = CoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        stop_token_ids=frozenset(stop_token_ids),
        max_tokens=params.max_tokens or 1,
        arrival_time=0.0,
        bad_words_token_ids=[list(word) for word in bad_words_token_ids],
        **fields,
    )
    return NewRequest(request, list(token_ids), block_ids, num_computed_tokens)
