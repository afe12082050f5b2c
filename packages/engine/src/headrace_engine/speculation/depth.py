"""How many guesses are worth checking: by what was right before, and by what steps of a size took.

A step that checks guesses takes longer than one that does not; how much longer, only measuring tells. A
request whose guesses are wrong is asked for none for a while, twice as long each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLEND = 0.2
"""Weight of the latest measurement in a mean."""
_LEAST_GAIN = 1.02
"""Tokens per second, by guesses, over those without, that a step must promise."""
_LONGEST_BELIEVED = 256
"""Steps with guesses after which one without is measured again."""
_LEAST_LIKELY = 0.2
_LONGEST_REST = 256
"""Steps that a request with wrong guesses is left alone, at most."""


class Acceptance:
    """One request's guesses so far."""

    __slots__ = ("_rest", "_resting", "rate")

    def __init__(self) -> None:
        self.rate = 0.7
        """Estimated share of guesses that are right, each given that those before it were."""
        self._resting = 0
        self._rest = 4

    def record(self, num_drafted: int, num_right: int) -> None:
        """So many guesses were checked, and so many of the first were right."""
        if not num_drafted:
            return
        tried = min(num_drafted, num_right + 1)
        self.rate += _BLEND * min(tried, 4) / 4 * (num_right / tried - self.rate)
        if num_right == num_drafted:
            self._rest = 4
        elif not num_right and self.rate < 0.2:
            self._resting, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)

    def rests(self) -> bool:
        """True if the request is to be left alone in this step; counts it."""
        if self._resting:
            self._resting -= 1
            return True
        return False

    def likely_right(self) -> int:
        """Guesses in a row of which the last is right more often than one in five times; at least 1."""
        rate = min(max(self.rate, 0.01), 0.99)
        return max(1, int(math.log(_LEAST_LIKELY) / math.log(rate)))

    def expected(self, num_drafts: int) -> float:
        """Right guesses among so many, expected."""
        rate = min(self.rate, 0.99)
        return rate * (1 - rate**num_drafts) / (1 - rate)


class StepCosts:
    """Seconds of steps by their number of tokens, as measured."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._ages: dict[int, int] = {}
        """By size: steps with guesses since one without was measured."""

    def record(self, num_tokens: int, num_guesses: int, seconds: float) -> None:
        """A step without prompts took so long; ``num_tokens`` do not count guesses."""
        key = _size(num_tokens + num_guesses)
        known = self._seconds.get(key)
        # What disturbs a step makes it longer: shorter times are believed at once.
        blend = 0.5 if known is not None and seconds < known else _BLEND
        self._seconds[key] = seconds if known is None else known + blend * (seconds - known)
        plain = _size(num_tokens)
        self._ages[plain] = self._ages.get(plain, 0) + 1 if num_guesses else 0

    def knows(self, num_tokens: int) -> bool:
        """True if a step without guesses was measured lately."""
        key = _size(num_tokens)
        return key in self._seconds and self._ages.get(key, 0) < _LONGEST_BELIEVED

    def ratio(self, num_tokens: int, num_guesses: int) -> float:
        """About the time of a step with guesses in that of one without; 1 where none was measured."""
        plain = self._seconds.get(_size(num_tokens))
        larger = self._seconds.get(_size(num_tokens + num_guesses))
        return 1.0 if plain is None or larger is None else max(larger / plain, 1.0)


def _size(num_tokens: int) -> int:
    """Steps of about one size are measured together: up to 8 each by itself, then eighths of octaves."""
    if num_tokens <= 8:
        return num_tokens
    shift = num_tokens.bit_length() - 4
    return (num_tokens >> shift) << shift


def _without_repetition(rate: Acceptance, count: int) -> tuple[float, float]:
    """Right guesses of a request in a step that checks so many, expected, and tokens that it computes beside
    the one that it would without."""
    return rate.expected(count), count


def _with_repetition(rate: Acceptance, count: int) -> tuple[float, float]:
    """The same, a step on average, where a step in which not all were right is followed by one that
    checks none and computes the right ones again."""
    right, fails = rate.expected(count), 1 - min(rate.rate, 0.99) ** count
    return right / (1 + fails), (count + fails * (1 + right)) / (1 + fails)


def limit(
    costs: StepCosts,
    num_tokens: int,
    guesses: Sequence[int],
    rates: Sequence[Acceptance],
    *,
    again: bool = False,
) -> list[int]:
    """How many of each request's guesses to check: the cut, equal for all, that promises most tokens a
    second; none at all if no cut promises more than a step without.

    Args:
        costs: of steps.
        num_tokens: of the step without guesses.
        guesses: numbers of guesses.
        rates: the same requests'.
        again: where not all of a request's guesses are right, its next step computes the right ones
            again, and checks none.
    """
    if not costs.knows(num_tokens):
        return [0] * len(guesses)
    best, best_gain = 0, _LEAST_GAIN
    for cut in range(1, max(guesses, default=0) + 1):
        counts = [min(cut, count) for count in guesses]
        per_step = _with_repetition if again else _without_repetition
        right, more = map(sum, zip(*map(per_step, rates, counts)))
        gain = (1 + right / num_tokens) / costs.ratio(num_tokens, round(more))
        if gain > best_gain:
            best, best_gain = cut, gain
    return [min(best, count) for count in guesses]
