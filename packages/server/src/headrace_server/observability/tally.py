"""Bookkeeping while a request's outputs pass: tokens, finish reasons, usage, metrics."""

from __future__ import annotations

from headrace_core.output import RequestOutput
from headrace_core.sampling.params import SamplingParams
from headrace_server.observability.metrics import Metrics
from headrace_server.protocols.openai.bodies.usage import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)


class Tally:
    """Tokens of one prompt's completions, from deltas or from a final output."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._timer = metrics.timer()
        self._reasons: dict[int, str] = {}
        self.num_tokens: dict[int, int] = {}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_reasoning_tokens = 0
        """Set at the end, by whoever knows."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        """Guesses that were checked, and those that were right."""

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_tokens.values())

    def count_prompt(self, output: RequestOutput) -> None:
        """Take in the prompt of an output, and nothing of what was generated."""
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens

    def count(self, output: RequestOutput) -> None:
        """Take in the next output."""
        self.count_prompt(output)
        if output.metrics is not None:
            self.num_draft_tokens = output.metrics.num_draft_tokens
            self.num_accepted_tokens = output.metrics.num_accepted_tokens
        new = 0
        for part in output.outputs:
            gained = len(part.token_ids)
            new = max(new, gained)
            self.num_tokens[part.index] = self.num_tokens.get(part.index, 0) + gained
            if part.finish_reason is not None:
                self._reasons[part.index] = part.finish_reason
        if not output.finished or self._timer.last > 0:
            self._metrics.saw_tokens(self._timer, new)
        if output.finished:
            self._metrics.finished(
                output, self._params, self._timer, self.num_tokens, self._reasons
            )

    def add(self, num_tokens: int) -> None:
        """Count tokens of the only completion, which goes on (:meth:`count` without an output)."""
        self.num_tokens[0] = self.num_tokens.get(0, 0) + num_tokens
        self._metrics.saw_tokens(self._timer, num_tokens)


def usage(tallies: list[Tally], *, details: bool, hidden: int = 0) -> Usage:
    """The sum over prompts.

    Args:
        details: report cached prompt tokens.
        hidden: generated tokens that were not asked for.
    """
    prompt = sum(tally.num_prompt_tokens for tally in tallies)
    generated = sum(tally.num_output_tokens for tally in tallies) - hidden
    reasoning = min(generated, sum(tally.num_reasoning_tokens for tally in tallies))
    cached = sum(tally.num_cached_tokens for tally in tallies)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached) if details else None,
        completion_tokens_details=_details(tallies, reasoning),
    )


def _details(tallies: list[Tally], reasoning: int) -> CompletionTokensDetails | None:
    """What is known of the completion tokens beside their number."""
    drafted = sum(tally.num_draft_tokens for tally in tallies)
    if not drafted:
        return CompletionTokensDetails(reasoning_tokens=reasoning) if reasoning else None
    accepted = sum(tally.num_accepted_tokens for tally in tallies)
    return CompletionTokensDetails(
        reasoning_tokens=reasoning,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=drafted - accepted,
    )
