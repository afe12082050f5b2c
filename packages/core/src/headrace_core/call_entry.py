"""How the prompts of one call enter an engine's queue."""

from __future__ import annotations

import asyncio


class CallEntry:
    """One entry into an engine's queue for all prompts of a call.

    The queue's limits are for calls: the first prompt that comes with an entry is let in or refused
    as a request, and no other is begun until it has been let in; then none is refused. Made and used
    on one event loop.
    """

    def __init__(self) -> None:
        self.door = asyncio.Lock()
        """Held by the prompt that is being let in."""
        self.let_in = False
        """Whether one has been."""
        self._places: asyncio.Semaphore | None = None

    def place(self, most: int) -> asyncio.Semaphore:
        """To be held by a prompt from before it is let in until it has ended.

        Args:
            most: prompts of the call that may be under way together; the first one's number counts.
        """
        if self._places is None:
            self._places = asyncio.Semaphore(most)
        return self._places
