"""How long a step will take, judged by the last ones of its kind."""

from __future__ import annotations

from headrace_core.step import ScheduledStep

MARGIN_SECONDS, MARGIN_SHARE = 0.01, 0.25
"""What must be left of a step when the next one is scheduled: this long, and this share of it."""


class StepPace:
    """Two kinds: steps in which every request computes one token, whose time hardly depends on how
    many they are, and steps with prompts, whose time grows with their tokens."""

    def __init__(self) -> None:
        self._decoding = 0.0
        self._per_token = 0.0

    def record(self, step: ScheduledStep, seconds: float) -> None:
        """A step took so long. One without requests says nothing of the others."""
        if not step.num_tokens:
            return
        if _decodes(step):
            self._decoding = seconds
        else:
            self._per_token = seconds / step.num_tokens

    def expected(self, step: ScheduledStep) -> float:
        """Seconds; 0 before the first step of its kind."""
        return self._decoding if _decodes(step) else self._per_token * step.num_tokens

    def spare(self, step: ScheduledStep) -> float:
        """Seconds of a step in which the next one need not be scheduled yet."""
        expected = self.expected(step)
        return max(0.0, expected - max(MARGIN_SECONDS, MARGIN_SHARE * expected))


def _decodes(step: ScheduledStep) -> bool:
    return step.num_tokens == len(step.num_scheduled_tokens)
