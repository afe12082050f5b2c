"""What the scheduler counts."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headrace_core.kv import KVCacheManager

MAX_KEPT_STEPS = 4096
"""Steps whose sizes are kept for a snapshot that nobody takes."""
MIN_RETRY_AFTER, MAX_RETRY_AFTER = 1.0, 60.0


@dataclass(slots=True)
class SchedulerCounters:
    """Running totals; they never fall."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_steps: int = 0
    iteration_tokens: int = 0
    step_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_STEPS))

    def count_step(self, num_tokens: int) -> None:
        self.num_steps += 1
        self.iteration_tokens += num_tokens
        self.step_tokens.append(num_tokens)

    def take_prefix_cache(self, kv: KVCacheManager) -> None:
        stats = kv.take_stats()
        self.prefix_cache_queries += stats.queries
        self.prefix_cache_hits += stats.hits


class AdmissionRate:
    """How fast requests leave the queue, measured over the last few."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=64)

    def record(self, now: float) -> None:
        """A request left the queue for the first time."""
        self._times.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a place in the queue should be free, within 1..60."""
        if not self._times:
            return MIN_RETRY_AFTER
        # Up to now, not up to the last one: a queue that has stopped moving looks slow.
        interval = (now - self._times[0]) / len(self._times)
        return min(max(interval, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
