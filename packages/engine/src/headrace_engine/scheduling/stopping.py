"""When a request ends because of its tokens. (Stop strings are found where text is known.)"""

from __future__ import annotations

from headrace_engine.scheduling.request import RequestState


def finish_reason(state: RequestState) -> str | None:
    """``stop``, ``length`` or None, judged by the last known token, which is an output token.

    A stop token counts from the ``min_tokens``-th output token on; it wins over a limit reached
    with the same token.
    """
    request, token_ids = state.request, state.all_token_ids
    if (
        token_ids[-1] in request.stop_token_ids
        and len(token_ids) - state.num_prompt_tokens >= request.params.min_tokens
    ):
        return "stop"
    return "length" if len(token_ids) >= state.max_num_tokens else None
