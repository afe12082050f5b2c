"""Media that are embedded beside steps, a slice after each.

Why and when: :mod:`headrace_engine.scheduler.media_ahead`.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from torch import Tensor

from headrace_core.multimodal import MediaInput
from headrace_engine.encoder.slices import FOREVER, EncoderSlices, SlicedWork

logger = logging.getLogger(__name__)


class VectorsAhead:
    """Items that wait for their slices, and vectors that wait for their steps.

    Args:
        embed: embeds one item: [num_vectors, H].
        slices: where it pauses.
        share: seconds of work for each second of steps.
        max_vectors: that wait for their steps at most, or one item's; then the oldest are forgotten.
        clock: seconds.
    """

    def __init__(
        self,
        embed: Callable[[MediaInput], Tensor],
        slices: EncoderSlices,
        share: float,
        max_vectors: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._embed, self._slices, self._share = embed, slices, share
        self._max_vectors, self._clock = max_vectors, clock
        self._queue: OrderedDict[str, MediaInput] = OrderedDict()
        self._work: SlicedWork[Tensor] | None = None
        """On the queue's first item; None: it has not begun."""
        self._made: OrderedDict[str, Tensor] = OrderedDict()
        self._credit = 0.0

    def add(self, items: Iterable[MediaInput]) -> list[str]:
        """Embed these too, in order; returns the hashes of those that were embedded before."""
        new = {item.content_hash: item for item in items}
        self._queue.update((name, item) for name, item in new.items() if name not in self._made)
        return [name for name in new if name in self._made]

    def advance(self, step_seconds: float) -> list[str]:
        """Work for the share of a step's time; what a slice took too long is taken from the next ones.

        Returns:
            Content hashes of items that are done; also of one that cannot be embedded, which fails in the
            step that reaches it.
        """
        done: list[str] = []
        if not self._queue:
            self._credit = 0.0
            return done
        self._credit += self._share * step_seconds
        while self._queue and self._credit > 0:
            begin = self._clock()
            name = self._slice(self._credit)
            self._credit -= self._clock() - begin
            if name is not None:
                done.append(name)
        return done

    def take(self, name: str) -> Tensor | None:
        """An item's vectors, once; None: it was not embedded ahead, and need not be any more. One that is
        being embedded is finished."""
        if name in self._queue:
            if self._work is not None and next(iter(self._queue)) == name:
                self._slice(FOREVER)
            else:
                del self._queue[name]
        return self._made.pop(name, None)

    def clear(self) -> None:
        """Forget all, also what is being worked at."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._queue.clear()
        self._made.clear()

    def _slice(self, seconds: float) -> str | None:
        """Work at the first item; its name if it is done."""
        name, item = next(iter(self._queue.items()))
        if self._work is None:
            self._work = self._slices.begin(lambda: self._embed(item))
        self._work.advance(seconds)
        result = self._work.result
        if not result.done():
            return None
        self._work = None
        del self._queue[name]
        if (error := result.exception()) is not None:
            logger.warning("an item of media could not be embedded beside steps: %s", error)
        else:
            self._keep(name, result.result())
        return name

    @property
    def _num_vectors(self) -> int:
        return sum(made.shape[0] for made in self._made.values())

    def _keep(self, name: str, vectors: Tensor) -> None:
        self._made[name] = vectors
        while len(self._made) > 1 and self._num_vectors > self._max_vectors:
            self._made.popitem(last=False)
