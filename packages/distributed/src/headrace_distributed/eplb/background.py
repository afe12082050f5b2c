"""An exchange of experts beside the steps: weights come into memory of their own, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.parallel import Communicator

Arrived = dict[int, "Tensor"]
"""See :func:`headrace_distributed.eplb.moves.receive_experts`."""


class BackgroundExchange:
    """One mixture's exchange on this rank, which begins at once.

    Args:
        receive: exchanges weights; only reads what steps read.
        group: of the exchange alone: steps use another one at the same time.
    """

    def __init__(self, receive: Callable[[], Arrived], group: Communicator) -> None:
        self._receive, self._group = receive, group
        self._done: Future[Arrived] = Future()
        self._thread = threading.Thread(target=self._run, name="headrace-experts", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """True if weights have come on every rank, or the exchange failed."""
        return self._done.done()

    def result(self) -> Arrived:
        """The weights, once they have come. Raises what the exchange raised."""
        return self._done.result()

    def close(self) -> None:
        """Return when the thread has ended. Idempotent."""
        self._thread.join()

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                arrived = self._receive()
                self._group.barrier()  # so that who has ended knows that all have what they need
            self._done.set_result(arrived)
        except BaseException as error:
            self._done.set_exception(error)
