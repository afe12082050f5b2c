"""Lengths of prompts and of their outputs."""

from __future__ import annotations

from headrace_core.errors import PromptTooLong, RequestError
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel


def truncate(ids: list[int], params: SamplingParams, limit: int) -> list[int]:
    """Keep the prompt's end, as ``truncate_prompt_tokens`` says; -1: as much as leaves room for the
    output.

    Args:
        limit: the context, in tokens.

    Raises:
        RequestError: more is to be kept than the context holds.
    """
    keep = params.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep > limit:
        raise RequestError(
            f"truncate_prompt_tokens = {keep}: must be at most max_model_len = {limit}, or -1",
            param="truncate_prompt_tokens",
            value=keep,
        )
    if keep == -1:
        keep = max(1, limit - _least_output(params, clamp=False))
    return ids[-keep:]


def max_tokens(
    num_prompt_tokens: int,
    params: SamplingParams,
    model: ServedModel,
    *,
    clamp: bool,
    source: str = "prompt",
) -> int:
    """Most tokens of the output: what is asked for, the server's cap, or the rest of the context.

    Args:
        clamp: shorten what is asked for to the rest of the context, instead of refusing it.
        source: where the prompt's tokens are: ``prompt`` or ``messages``.

    Raises:
        PromptTooLong: prompt and output do not fit into the context.
        RequestError: ``min_tokens`` is more than the server's cap.
    """
    cap = model.default_sampling_params.get("max_tokens")
    if cap is not None and params.min_tokens > cap:
        raise RequestError(
            f"min_tokens = {params.min_tokens}: must be at most {cap}, where every output ends "
            "(max_new_tokens of the generation config)",
            param="min_tokens",
            value=params.min_tokens,
        )
    limit = model.max_model_len
    room = limit - num_prompt_tokens
    wanted = params.max_tokens
    least = _least_output(params, clamp)
    if room < least:
        param = source if room < 1 or wanted is None else "max_tokens"
        raise PromptTooLong(limit, num_prompt_tokens, least, param=param, source=source)
    return min(n for n in (room, wanted, cap) if n is not None)


def _least_output(params: SamplingParams, clamp: bool) -> int:
    """Tokens for which there must be room."""
    if clamp or params.max_tokens is None:
        return max(1, params.min_tokens)
    return params.max_tokens
