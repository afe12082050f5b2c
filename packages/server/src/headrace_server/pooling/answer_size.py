"""Count of the numbers in an answer, before anything is computed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace_core.errors import RequestError
from headrace_core.pooling import EMBED_TASKS, TOKEN_TASKS, PoolingInfo, PoolingParams
from headrace_core.request import Prompt
from headrace_server.requests.bounded_gather import in_order
from headrace_server.state import ServerState

_AROUND = 64
"""Tokens that a tokenizer may put around a text, and more."""
_AT_ONCE = 64
"""Texts that are tokenized side by side."""


async def check_answer_size(
    prompts: Sequence[Prompt],
    params: PoolingParams,
    state: ServerState,
    *,
    task: str,
    special: bool | None,
) -> None:
    """Refuse a call whose answer would have more numbers than ``--max-answer-numbers``.

    Raises:
        RequestError: says how many it would have.
    """
    info, limit = state.engine.model.pooling, state.settings.max_answer_numbers
    if info is None:
        return
    width = _width(task, params, info)
    rows = len(prompts)
    if task in TOKEN_TASKS:
        rows = await _count_rows(prompts, params, state, special, limit // max(1, width))
    if rows * width > limit:
        raise RequestError(
            f"prompt: the answer would have {rows} rows of {width} numbers, {rows * width} in all; one "
            f"answer may have {limit} (--max-answer-numbers); send fewer or shorter inputs",
            param="prompt",
            value=rows * width,
        )


def _width(task: str, params: PoolingParams, info: PoolingInfo) -> int:
    """Numbers of a row."""
    if task in EMBED_TASKS:
        return params.dimensions or info.dimensions or info.embedding_size
    return len(params.returned_token_ids or info.returned_token_ids or ()) or info.num_labels


async def _count_rows(
    prompts: Sequence[Prompt],
    params: PoolingParams,
    state: ServerState,
    special: bool | None,
    room: int,
) -> int:
    """Tokens of prompts. Texts are only tokenized if their lengths leave open what fits into
    ``room``."""
    longest = state.engine.model.max_model_len
    if params.truncate_prompt_tokens not in (None, -1):
        longest = min(longest, params.truncate_prompt_tokens or longest)

    async def count(_: int, prompt: Prompt) -> int:
        told = await state.engine.tokenize(prompt, add_special_tokens=special)
        return min(longest, len(told.token_ids))

    most = sum(min(longest, _most_tokens(prompt, longest)) for prompt in prompts)
    return most if most <= room else sum(await in_order(count, prompts, _AT_ONCE))


def _most_tokens(prompt: Prompt, longest: int) -> int:
    if not isinstance(prompt, Mapping):
        return longest
    ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    if isinstance(ids, list):
        return len(ids)
    if isinstance(text, str):  # a token is at least one byte of it
        return len(text.encode("utf-8", "surrogatepass")) + _AROUND
    return longest
