"""One of several engines: its process, and those that come after it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from headrace_engine.clients.process import ProcessClient
from headrace_engine.messages import CoreOutputs

MOST_FALLS = 5
FALLS_SECONDS = 60.0
"""An engine that ends this often in so many seconds is not replaced again."""


class Replica:
    """One engine's process, and those that come after it.

    Args:
        index: the engine's number, from 0.
        client: of its first process.
    """

    def __init__(self, index: int, client: ProcessClient) -> None:
        self.index = index
        self.client = client
        self.failure: str | None = None
        """Why it does not run; None while it does."""
        self.replacement: threading.Thread | None = None
        """Starts the next process, while it does."""
        self.leaves = False
        """It takes no further requests, and ends once it has none."""
        self._falls: deque[float] = deque(maxlen=MOST_FALLS)
        self._failed_starts = 0

    @property
    def runs(self) -> bool:
        return self.failure is None

    @property
    def takes_requests(self) -> bool:
        return self.runs and not self.leaves

    def runs_again(self) -> None:
        """Its new process takes requests."""
        self.failure, self.replacement, self._failed_starts = None, None, 0

    def fell(self, now: float) -> str | None:
        """Note that its process ended; why there should be no further one, if so.

        Args:
            now: seconds.
        """
        self._falls.append(now)
        if len(self._falls) == MOST_FALLS and now - self._falls[0] < FALLS_SECONDS:
            return f"it ended {MOST_FALLS} times in {FALLS_SECONDS:g} s"
        return None

    def failed_to_start(self, now: float) -> str | None:
        """Note that a new process did not come to run; why there should be no further one, if so."""
        self._failed_starts += 1
        if self._failed_starts == MOST_FALLS:
            return f"{MOST_FALLS} replacements in a row failed"
        return self.fell(now)

    def __str__(self) -> str:
        """What is wrong with it."""
        what = "it is being replaced" if self.replacement is not None else "it is not replaced"
        return f"engine {self.index}: {self.failure}; {what}"


class _Taker(Protocol):
    """What has several engines."""

    def take_outputs(self, outputs: CoreOutputs) -> None: ...
    def lose(self, replica: Replica, client: ProcessClient, error: BaseException) -> None: ...


class ReplicaSink:
    """Takes the outputs of one engine's process, and its end."""

    def __init__(self, taker: _Taker, replica: Replica, client: ProcessClient) -> None:
        self._taker, self._replica, self._client = taker, replica, client

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self._taker.take_outputs(outputs)

    def on_death(self, error: BaseException) -> None:
        self._taker.lose(self._replica, self._client, error)
