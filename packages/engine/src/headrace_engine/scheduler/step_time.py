"""How long steps take, by their tokens: learned from those that ran. Pure: nothing here looks at a clock."""

from __future__ import annotations

MEMORY = 0.9
"""Share of its weight that an observation keeps when the next one of its kind comes."""
OUTLIER = 2.0
"""An observation counts as at most so many times what was expected, and as no less than that part of it: a
pause of the machine says little of the next step, and what has really changed is said again."""
STRETCH = 2
"""Prompts get at most so many times the tokens that they had in a step lately: beyond that the line is not
known."""
RIDGE = 1.0
"""Squared tokens. Numbers of decoding tokens that differ less than this say nothing of their slope."""


class StepTimeModel:
    """Seconds of a step, as a sum of two parts::

        seconds = plain(decoding tokens) + per_prompt_token * prompt tokens

    ``plain`` is a straight line that is fitted to steps without prompts; where their sizes are all alike it
    is their mean. ``per_prompt_token`` is fitted to what steps with prompts take beyond that, by a line
    through zero, with errors that grow with the tokens. Two parameters in one fit would be lost as soon as
    steps are all alike, and they are: this model chooses their sizes. A line through zero is right at the
    size that steps have, even where ``plain`` is old.

    Both are least squares that forget (:data:`MEMORY`). No slope is negative: more tokens never seem to take
    less time.
    """

    def __init__(self) -> None:
        self._plain = _Line()
        self._prompt_tokens = 0.0
        self._prompt_seconds = 0.0
        """Sums over steps with prompts, the older the less; their quotient is the slope."""
        self._largest = 0.0
        """Prompt tokens of the largest step lately."""

    def record(self, seconds: float, num_decoding: int, num_prompt: int) -> None:
        """A step took so long.

        Args:
            num_decoding: its tokens but for those of prompts.
            num_prompt: tokens of prompts.
        """
        if not num_prompt:
            if num_decoding:
                self._plain.record(num_decoding, seconds)
            return
        plain = self.plain(num_decoding)
        if self.knows_prompts:
            seconds = _near(seconds, plain + self.per_prompt_token * num_prompt)
        self._prompt_tokens = MEMORY * self._prompt_tokens + num_prompt
        self._prompt_seconds = MEMORY * self._prompt_seconds + max(0.0, seconds - plain)
        self._largest = max(float(num_prompt), MEMORY * self._largest)

    @property
    def knows_prompts(self) -> bool:
        """True once a step with prompts has ended."""
        return self._prompt_tokens > 0

    @property
    def per_prompt_token(self) -> float:
        """Seconds; 0 before the first step with prompts."""
        return self._prompt_seconds / self._prompt_tokens if self.knows_prompts else 0.0

    def plain(self, num_decoding: int) -> float:
        """Seconds of a step without prompts; 0 before the first one."""
        return self._plain.at(num_decoding)

    def expected(self, num_decoding: int, num_prompt: int) -> float:
        """Seconds of a step."""
        return self.plain(num_decoding) + self.per_prompt_token * num_prompt

    def prompt_tokens_within(self, seconds: float, num_decoding: int) -> int:
        """Most prompt tokens of a step that is expected to take so long; 0 if there is no time for any, or
        nothing is known of them yet."""
        left = seconds - self.plain(num_decoding)
        most = int(STRETCH * self._largest)
        if left <= 0 or most == 0:
            return 0
        if self.per_prompt_token * most <= left:
            return most
        return int(left / self.per_prompt_token)


class _Line:
    """A straight line through points that are forgotten, rising or level, by its mean and its slope."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._mean_x = self._mean_y = 0.0
        self._variance = self._covariance = 0.0
        """Sums of products of deviations from the means."""

    def record(self, x: float, y: float) -> None:
        if self._weight:
            y = _near(y, self.at(x))
        self._weight = MEMORY * self._weight + 1.0
        deviation = x - self._mean_x
        self._mean_x += deviation / self._weight
        self._mean_y += (y - self._mean_y) / self._weight
        self._variance = MEMORY * self._variance + deviation * (x - self._mean_x)
        self._covariance = MEMORY * self._covariance + deviation * (y - self._mean_y)

    def at(self, x: float) -> float:
        slope = max(0.0, self._covariance / (self._variance + RIDGE))
        return max(0.0, self._mean_y + slope * (x - self._mean_x))


def _near(seconds: float, expected: float) -> float:
    """An observation, without what is out of proportion."""
    if expected <= 0:
        return seconds
    return min(max(seconds, expected / OUTLIER), expected * OUTLIER)
