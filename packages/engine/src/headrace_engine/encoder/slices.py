"""Work of encoders in slices: in a thread of its own, which stops between layers when its time is over.

Only one of the two threads computes at any time: whoever asks for a slice waits for its end. So kernels have
their threads for themselves, and what is computed does not depend on where the work was cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from headrace_core.attention import AttentionLayerSpec, EncoderBackend

Result = TypeVar("Result")
FOREVER = float("inf")


class _Closed(BaseException):
    """Unwinds the work of a thread that is given up."""


class SlicedWork(Generic[Result]):
    """One piece of work, in inference mode. Made, advanced and closed by one thread.

    Args:
        work: calls :meth:`pause` from time to time.
        clock: seconds.
    """

    def __init__(self, work: Callable[[], Result], clock: Callable[[], float]) -> None:
        self._work, self._clock = work, clock
        self.result: Future[Result] = Future()
        """Done when the work is."""
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._thread.start()

    def advance(self, seconds: float) -> None:
        """Let it work for about so long, or to its end."""
        if self.result.done():
            return
        self._until = self._clock() + seconds
        self._go.release()
        self._back.acquire()

    def pause(self) -> None:
        """End the slice if its time is over. Other threads than the work's go on."""
        if threading.current_thread() is not self._thread or self._clock() < self._until:
            return
        self._back.release()
        self._wait()

    def close(self) -> None:
        """Give the work up. Idempotent."""
        self._is_closed = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_closed:
            raise _Closed

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            self._wait()
            self.result.set_result(self._work())
        except _Closed:
            self.result.cancel()
        except BaseException as error:
            self.result.set_exception(error)
        self._back.release()


class EncoderSlices:
    """The place where encoders' layers pause. One piece of work at a time.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._current: SlicedWork[Any] | None = None

    def begin(self, work: Callable[[], Result]) -> SlicedWork[Result]:
        """A piece of work, which runs when it is advanced; the one before must be done or closed."""
        sliced = SlicedWork(work, self._clock)
        self._current = sliced
        return sliced

    def pause(self) -> None:
        """Called between layers; see :meth:`SlicedWork.pause`."""
        if self._current is not None:
            self._current.pause()


class PausingBackend(EncoderBackend):
    """Another backend, with a pause before each layer's attention.

    Args:
        backend: does the work.
        pause: may take long.
    """

    name = "pausing"

    def __init__(self, backend: EncoderBackend, pause: Callable[[], None]) -> None:
        super().__init__(backend.ops)
        self._backend, self._pause = backend, pause

    def attend(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        distance_bias: Tensor | None = None,
        key_lens: Tensor | None = None,
    ) -> Tensor:
        """See :meth:`headrace_core.attention.EncoderBackend.attend`."""
        self._pause()
        return self._backend.attend(
            layer, query, key, value, cu_seqlens, max_seqlen,
            distance_bias=distance_bias, key_lens=key_lens,
        )  # fmt: skip
