"""The other ranks of an engine while weights change, as rank 0's worker leads them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from headrace_core.errors import EngineDead, HeadraceError
from headrace_engine.clients.wire import RemoteError, as_data, as_exception
from headrace_engine.weights.led_calls import BUILD, CHANGE

logger = logging.getLogger(__name__)


class OtherRanks:
    """Calls to the workers of the other ranks, which they obey after the passes until now.

    Args:
        call: calls a method of each, in any thread; results by rank from 1. None: there are none.
    """

    def __init__(
        self, call: Callable[[str, Sequence[Any]], list[Future[Any]]] | None = None
    ) -> None:
        self._call = call

    @property
    def are_there(self) -> bool:
        """True if the engine has several ranks."""
        return self._call is not None

    def change(self, step: str, *args: Any) -> list[Any]:
        """Have every other rank do a step of a change, and wait for all of them: results by rank from 1.

        Args:
            step: one of :data:`~headrace_engine.weights.led_calls.STEPS`.

        Raises:
            HeadraceError, MemoryError: of the lowest rank that raised, which the message names.
            EngineDead: a rank has ended.
        """
        answers = self.begin(step, *args)
        errors = [answer.exception() for answer in answers]
        for rank, error in enumerate(errors, 1):
            if error is not None:
                raise named(rank, error) from error
        return [answer.result() for answer in answers]

    def begin(self, step: str, *args: Any) -> list[Future[Any]]:
        """As :meth:`change`, without waiting."""
        return [] if self._call is None else self._call(CHANGE, (step, *args))

    def undo(self, step: str, *args: Any) -> None:
        """As :meth:`change`, after something has failed, whose error is the one to tell. A rank that has
        ended has undone everything."""
        try:
            self.change(step, *args)
        except EngineDead:
            pass  # whoever runs the next pass finds that out
        except Exception:
            logger.exception("weights: %s failed on another rank", step)

    def build(self, path: str, failed: FirstError) -> list[Future[Any]]:
        """Have every other rank build its share of another model beside its passes.

        Args:
            failed: is told of errors.
        """
        answers = [] if self._call is None else self._call(BUILD, (path,))
        for rank, answer in enumerate(answers, 1):
            answer.add_done_callback(partial(failed.see, rank))
        return answers


class FirstError:
    """The error of the rank that failed first, of several that work at the same time. Thread-safe.

    Args:
        then: called at the first one, in the thread that tells of it; must not wait.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._lock = threading.Lock()
        self._first: BaseException | None = None

    def see(self, rank: int, done: Future[Any]) -> None:
        """A rank has ended its work."""
        error = done.exception()
        if error is not None:
            self.note(rank, error)

    def note(self, rank: int, error: BaseException) -> None:
        """A rank has failed."""
        with self._lock:
            is_first, self._first = self._first is None, self._first or named(rank, error)
        if is_first:
            self._then()

    def check(self) -> None:
        """Raises: the error, if there is one."""
        if self._first is not None:
            raise self._first


def named(rank: int, error: BaseException) -> BaseException:
    """An error whose message names the rank that raised it; the end of a rank says which one ended."""
    if isinstance(error, EngineDead) or not isinstance(error, HeadraceError | MemoryError):
        return error
    data = as_data(error)
    return as_exception(RemoteError(data.kind, f"rank {rank}: {data.message}", data.details))
