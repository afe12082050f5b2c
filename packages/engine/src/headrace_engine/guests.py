"""Code of callers that runs in an engine's own threads: :class:`Guests`.

The engine waits for such code. So it must come to an end of its own, and it cannot ask the engine for
anything: the answer would wait for the question.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from headrace_core.errors import EngineError

Result = TypeVar("Result")


class Guests:
    """The code of callers that runs inside one engine. Thread-safe."""

    def __init__(self) -> None:
        self._local = threading.local()

    def mark(self, worker: object, starter: int) -> None:
        """Note that the calling thread is a worker's: code of others that its steps run (a logits
        processor, a model) is inside, too.

        Args:
            starter: ident of the thread that starts the engine, which is never a worker's.
        """
        if threading.get_ident() != starter:
            self._local.inside = "code of a worker's step"

    @property
    def inside(self) -> str | None:
        """The code that the calling thread runs for the engine; None: it is not the engine's thread."""
        found: str | None = getattr(self._local, "inside", None)
        return found

    def welcome(self, call: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """The same function, made safe for the engine's threads.

        Args:
            call: the method that brought it, for messages.

        Raises:
            EngineError: from the function that is returned: it would have ended the thread.
        """
        name = f"{call}: {name_of(function)}"

        def run(*args: Any) -> Result:
            outer, self._local.inside = self.inside, name
            try:
                return function(*args)
            except Exception:
                raise
            except BaseException as error:
                raise must_not_end(name, error) from error
            finally:
                self._local.inside = outer

        return run

    def refuse_calls(self) -> None:
        """Raises: EngineError, the calling thread runs something for the engine."""
        if self.inside is not None:
            raise EngineError(
                f"{self.inside} called the engine that runs it, which would wait for itself for ever: "
                "return first, then call"
            )


def must_not_end(name: str, error: BaseException) -> EngineError:
    """The error of a call that raised what ends a thread (``SystemExit``, ``KeyboardInterrupt``).

    Args:
        name: of what was called.
    """
    return EngineError(
        f"{name} raised {error!r:.200}, which would end the engine's worker; raise an Exception, or return"
    )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
