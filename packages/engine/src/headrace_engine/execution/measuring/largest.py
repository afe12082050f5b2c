"""The cost of the largest step: bytes at its peak, and seconds."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from headrace_core.multimodal import MediaInput
from headrace_engine.execution.dummy import DummySteps
from headrace_engine.execution.measuring.measure import MemoryMeter

MEASURED_TOKENS, MEASURED_SEQS = 256, 16
"""On a CPU the largest step is measured whole up to these sizes, beyond them from steps of these
sizes: prompts of so many tokens cost each token the same, and seconds of a start are saved."""


@dataclass(frozen=True, slots=True)
class LargestItem:
    """An item of a kind that takes as much as any, or so many times less."""

    item: MediaInput
    factor: float = 1.0


class LargestStep:
    """Measures without a cache.

    Args:
        tokens: most tokens of a step.
        seqs: most requests of a step.
    """

    def __init__(self, steps: DummySteps, meter: MemoryMeter, tokens: int, seqs: int) -> None:
        self._steps = steps
        self._meter = meter
        self._tokens = tokens
        self._seqs = seqs

    def measure(self, *, whole: bool) -> tuple[int, float]:
        """Bytes that the step adds at its peak, and its seconds.

        Args:
            whole: run it however large it is; else a large one is reckoned from one prompt, for
                what grows with the tokens, and one step of single tokens, for what grows with the
                rows that are sampled.
        """
        # A small step settles thread pools and allocators.
        self._steps.run(min(self._tokens, 64), min(self._seqs, 2))
        small = self._tokens <= MEASURED_TOKENS and self._seqs <= MEASURED_SEQS
        if whole or small:
            return self._measure(self._tokens, self._seqs)
        length = min(self._tokens, MEASURED_TOKENS)
        most_rows = min(self._seqs, self._tokens)
        rows = min(most_rows, MEASURED_SEQS)
        prompt, sampled = self._measure(length, 1), self._measure(rows, rows)
        by_token, by_row = self._tokens / length, most_rows / rows
        bytes_, seconds = (p * by_token + s * by_row for p, s in zip(prompt, sampled))
        return int(bytes_), seconds

    def measure_media(self, items: Iterable[LargestItem]) -> tuple[int, float]:
        """Bytes and seconds of encoding or embedding as many items as one step may hold.

        The largest item is measured alone: several take so many times as much.

        Args:
            items: of each kind one.
        """
        bytes_, seconds = 0, 0.0
        for largest in items:
            begin = time.perf_counter()
            with self._meter.peak() as peak:
                self._steps.run_media(largest.item)
            # A step begins no further item once it holds its budget's worth, and may cut one.
            count = 1 + self._tokens // max(1, int(largest.item.num_tokens * largest.factor))
            times = count * largest.factor
            bytes_ = max(bytes_, int(times * peak.bytes))
            seconds = max(seconds, times * (time.perf_counter() - begin))
        return bytes_, seconds

    def _measure(self, num_tokens: int, num_seqs: int) -> tuple[int, float]:
        begin = time.perf_counter()
        with self._meter.peak() as peak:
            self._steps.run(num_tokens, num_seqs)
        return peak.bytes, time.perf_counter() - begin
