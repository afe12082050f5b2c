"""When a request ends because of its tokens. (Stop strings are found where text is known.)"""

from __future__ import annotations

from headrace_engine.scheduling.request import RequestState


def finish_reason(state: RequestState, max_model_len: int) -> str | None:
    """``stop``, ``length`` or None, judged by the last known token, which is an output token.

    A stop token counts from the ``min_tokens``-th output token on; it wins over a limit reached
    with the same token.
    """
    request, num_output_tokens = state.request, state.num_output_tokens
    if (
        state.all_token_ids[-1] in request.stop_token_ids
        and num_output_tokens >= request.params.min_tokens
    ):
        return "stop"
    if num_output_tokens >= request.max_tokens or len(state.all_token_ids) >= max_model_len:
        return "length"
    return None


def all_tokens_scheduled(state: RequestState, max_model_len: int) -> bool:
    """Whether the steps in flight bring the request to a length limit, so that no more may run."""
    num_tokens = state.num_tokens
    return (
        num_tokens - state.num_prompt_tokens >= state.request.max_tokens
        or num_tokens >= max_model_len
    )
