"""The result of a beam search, in the form of an output of sampling."""

from __future__ import annotations

from headrace_core.output import BeamSearchOutput, CompletionOutput, RequestOutput


def as_request_output(found: BeamSearchOutput, request_id: str) -> RequestOutput:
    """A final output with one completion for each sequence, the likeliest first."""
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=found.prompt_token_ids,
        outputs=[
            CompletionOutput(
                index=index,
                text=sequence.output_text or "",
                token_ids=sequence.output_token_ids,
                cumulative_logprob=sequence.cum_logprob,
                finish_reason=sequence.finish_reason,
            )
            for index, sequence in enumerate(found.sequences)
        ],
        finished=True,
        num_cached_tokens=found.num_cached_tokens,
        weights_versions=found.weights_versions,
    )
