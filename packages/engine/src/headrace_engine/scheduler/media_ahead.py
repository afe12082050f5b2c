"""Media that a worker embeds beside steps, so that requests which decode wait for slices of that work only.

A request whose media lack vectors is left out of steps while others decode. The worker gets the items with a
step, works at them between steps (:mod:`headrace_engine.encoder.slices`), and says with a later
step's result which are done. Where nobody decodes, an item is embedded in the step that reaches it. What is
remembered here is what the worker should still have: if it has not, it embeds the item in that step, and
nothing is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from headrace_core.multimodal import MediaInput
from headrace_engine.given_vectors import VECTORS
from headrace_engine.scheduler.request import SchedulerRequest

MOST_ASKED = 2
"""Items at a time, one that is worked at and one behind it: what a client that leaves has asked for is
embedded for nobody."""


class MediaAhead:
    """Args:
    running: the scheduler's running requests; not changed.
    max_vectors: that the worker keeps, of all items, or one item's; 0: nothing is embedded ahead.
    """

    def __init__(self, running: Iterable[SchedulerRequest], max_vectors: int) -> None:
        self._running, self._max_vectors = running, max_vectors
        self._wanted: dict[str, MediaInput] = {}
        self._asked: dict[str, int] = {}
        self._ready: OrderedDict[str, int] = OrderedDict()

    @property
    def applies(self) -> bool:
        """Whether requests may wait for their media now: others decode."""
        return self._max_vectors > 0 and any(map(_decodes, self._running))

    def lacks(self, item: MediaInput) -> bool:
        """Whether an item's vectors are to come; then they are asked for."""
        name = item.content_hash
        if name in self._ready:
            self._ready.move_to_end(name)
            return False
        if not name or VECTORS in item.inputs:
            return False
        if name not in self._asked and self._has_room(item.num_vectors):
            self._wanted[name] = item
        return True

    def take_wanted(self) -> list[MediaInput]:
        """What the next step asks for, each item once."""
        wanted = list(self._wanted.values())
        self._asked |= {item.content_hash: item.num_vectors for item in wanted}
        self._wanted.clear()
        return wanted

    def drop_wanted(self) -> None:
        """Nobody waits after all."""
        self._wanted.clear()

    def take_done(self, names: Iterable[str]) -> None:
        """These are embedded, or cannot be: their requests go on."""
        for name in names:
            size = self._asked.pop(name, None)
            if size is not None:
                self._ready[name] = size
        while len(self._ready) > 1 and sum(self._ready.values()) > self._max_vectors:
            self._ready.popitem(last=False)

    def forget(self) -> None:
        """A step has failed: nobody knows what the worker has."""
        self._wanted, self._asked = {}, {}
        self._ready.clear()

    def _has_room(self, num_vectors: int) -> bool:
        """Items that are asked for must not push each other out of what the worker keeps."""
        asked = [*self._asked.values(), *(item.num_vectors for item in self._wanted.values())]
        fits = sum(asked) + num_vectors <= self._max_vectors
        return not asked or (len(asked) < MOST_ASKED and fits)


def _decodes(state: SchedulerRequest) -> bool:
    return state.num_tokens - state.num_computed_tokens <= 1 and state.num_output_tokens > 0
