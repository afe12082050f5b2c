"""A swap of weights, as the core sees it: others are read beside the running ones, and take their place.

The new model is built in a thread of its own while steps go on. When it has passed its checks, requests
that come are kept back, and those that the scheduler has end on the old weights. Then the workers change
models, and who was kept back goes on with the new one. Whatever fails on the way leaves the old weights in
place (ADR 0116).
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from headrace_core.errors import EngineDead, EngineError, HeadraceError, RequestError
from headrace_core.executor import Executor
from headrace_engine.weights.order import Probe, SwapOrder

logger = logging.getLogger(__name__)


class SwappingWorker(Protocol):
    """Methods of a worker beside :class:`headrace_core.executor.Worker` that a swap needs."""

    def build_beside(
        self, path: str, probes: tuple[Probe, ...], max_perplexity: float | None
    ) -> dict[str, Any]:
        """Build and check the next model, in another thread than the one that runs steps.

        Returns:
            ``bytes`` of the model, ``perplexity`` of the probes (None: there are none), and whether it has
            been ``tried``; if not, :meth:`probe_beside` comes next.

        Raises:
            RequestError: the checkpoint does not fit, or there is no memory for it; says why.
            UnsupportedFeature: this worker cannot.
        """
        ...

    def probe_beside(self) -> dict[str, Any] | None:
        """Run a pass of the next model's probes, between two steps: of several ranks passes are exchanges,
        and cannot run beside others. None: further ones are to come; else ``perplexity``.

        Raises:
            RequestError: the model fails.
        """
        ...

    def adopt_beside(self) -> None:
        """Serve with that model from now on, on the cache that there is. No request may be under way. What
        this raises leaves the old model in place."""
        ...

    def drop_beside(self) -> None:
        """Forget that model, if there is one, and return its memory."""
        ...


class SwapTarget(Protocol):
    """The core, as far as a swap needs it."""

    def drain(self) -> bool:
        """Let every request that was begun go on; True if none is left, and no prefix is cached."""
        ...

    def weights_swapped(self, version: str | None) -> tuple[str, str]:
        """The workers have another model, and nothing that was computed is of it: its version (None: the
        next number). Returns the version before and the new one."""
        ...


class WeightsSwap:
    """The swap that is under way, if one is. Belongs to the core's thread.

    Args:
        executor: its workers are :class:`SwappingWorker`, or refuse.
        target: whose weights are swapped.
        clock: monotonic seconds.
    """

    def __init__(
        self, executor: Executor, target: SwapTarget, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._target = target
        self._clock = clock
        self._order: SwapOrder | None = None
        self.is_under_way = False
        """True from the order to the answer. No property: it is asked in every step."""
        self._built: Future[list[Any]] = Future()
        self._answer: Future[list[Any]] = Future()
        self._facts: dict[str, Any] = {}
        """What is known of the new weights."""
        self._times: dict[str, float] = {}
        self._began = 0.0
        """Of the phase that it is in."""
        self.ends: Future[None] | None = None
        """While requests are kept back: resolves when they need not be any longer."""

    def check_none(self, call: str) -> None:
        """Raises: RequestError, weights are being swapped, and ``call`` would come between."""
        if self._order is not None:
            raise RequestError(
                f"{call}: must wait until weights are swapped: those of {self._order.path!r:.200} are "
                "on their way",
                param="method",
            )

    def begin(self, order: SwapOrder) -> Future[list[Any]]:
        """Start reading; returns at once.

        Returns:
            Resolves when the new weights serve, to one mapping of plain data: ``weights_version``,
            ``previous_version``, ``bytes``, ``perplexity`` and ``seconds`` (``build``, ``drain``,
            ``switch``). Raises RequestError if the weights cannot be used or requests do not end in time,
            EngineError if something unforeseen fails. The old weights serve on then.

        Raises:
            RequestError: another swap is under way.
            UnsupportedFeature: the workers cannot.
        """
        self.check_none("swap_weights")
        built = self._executor.call_beside(
            "build_beside", order.path, order.probes, order.max_perplexity
        )
        self._order, self._built, self._answer = order, built, Future()
        self.is_under_way = True
        self._began, self._times, self._facts = self._clock(), {}, {}
        logger.info("swap_weights: reading %r beside the running weights", order.path)
        return self._answer

    def advance(self) -> None:
        """Go on as far as it is possible now. To be called between steps."""
        order = self._order
        if order is None or (self.ends is None and not self._built.done()):
            return
        if self.ends is None:
            if (error := self._built.exception()) is not None:
                self._give_up(error)
                return
            self._facts = self._facts or dict(self._built.result(0)[0])
            if not self._has_passed():
                return
            self._next_phase("build")
            self.ends = Future()
        if self._target.drain():
            self._next_phase("drain")
            self._switch(order)
        elif self._clock() - self._began > order.drain_seconds:
            self._give_up(
                RequestError(
                    f"drain_timeout = {order.drain_seconds:g}: requests still run so many seconds after the "
                    "new weights are ready: must be longer, or they must be ended",
                    param="drain_timeout",
                )
            )

    def _has_passed(self) -> bool:
        """True once the new weights have passed their probes; else a pass of these has been run, or they have
        failed."""
        if self._facts.get("tried", True):
            return True
        try:
            found = self._executor.call("probe_beside")[0]
        except Exception as error:
            if self._executor.failure is not None:
                raise
            self._give_up(error)
            return False
        if found is None:
            return False
        self._facts |= {**found, "tried": True}
        return True

    def _switch(self, order: SwapOrder) -> None:
        try:
            self._executor.call("adopt_beside")
        except Exception as error:
            if self._executor.failure is not None:
                raise
            self._give_up(error)
            return
        self._next_phase("switch")
        previous, version = self._target.weights_swapped(order.version)
        facts = {"weights_version": version, "previous_version": previous}
        facts |= {name: self._facts[name] for name in ("bytes", "perplexity")}
        seconds = {phase: round(value, 3) for phase, value in self._times.items()}
        logger.info(
            "swap_weights: %r serves now: %s",
            order.path,
            ", ".join(f"{phase} {value:.3f} s" for phase, value in seconds.items()),
        )
        self._end()
        self._answer.set_result([{**facts, "seconds": seconds}])

    def _give_up(self, error: BaseException) -> None:
        """The old weights serve on."""
        assert self._order is not None
        ours = isinstance(error, HeadraceError)
        logger.error(
            "swap_weights: %r is given up; the weights before serve on: %s",
            self._order.path,
            error,
            exc_info=None if ours else error,
        )
        _clear_frames(error)
        with suppress(EngineDead):  # which the loop finds out by itself
            self._executor.call("drop_beside")
        self._end()
        self._answer.set_exception(
            error
            if ours
            else EngineError(
                f"swap_weights failed, and the weights before serve on: {type(error).__name__}: {error}"
            )
        )

    def _end(self) -> None:
        ends, self.ends = self.ends, None
        self._order, self._built = None, Future()
        self.is_under_way = False
        if ends is not None:
            ends.set_result(None)

    def _next_phase(self, ended: str) -> None:
        now = self._clock()
        self._times[ended], self._began = now - self._began, now


def _clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames hold in which an error was raised: a model, for one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
