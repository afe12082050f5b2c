"""The gate in front of a paused engine: requests wait behind it."""

from __future__ import annotations

import asyncio


class PauseGate:
    """Open at first. Belongs to one event loop, from the first wait on."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._paused = False
        self.num_held = 0
        """Requests that wait here."""

    @property
    def paused(self) -> bool:
        """Whether the gate was closed last."""
        return self._paused

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self._paused = True
        self._open.clear()

    def open(self) -> None:
        """Let everybody through."""
        self._paused = False
        self._open.set()

    def give_up(self) -> None:
        """Let everybody through without opening: the engine has stopped, and says so to them."""
        self._open.set()

    async def passed(self) -> None:
        """Return at once if the gate is open, else when it opens."""
        if self._open.is_set():
            return
        self.num_held += 1
        try:
            await self._open.wait()
        finally:
            self.num_held -= 1
