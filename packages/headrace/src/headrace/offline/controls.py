"""Calls that steer a running engine, the same for ``LLM`` and ``LLMEngine``: :class:`EngineControls`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.offline.arguments import as_timeout, as_worker_call
from headrace_core.errors import RequestError

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine


class EngineControls(ABC):
    """Steers an engine and its workers."""

    @property
    @abstractmethod
    def engine(self) -> OfflineEngine:
        """The synchronous engine underneath, of the package headrace-engine."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget cached blocks; False if some are in use and running requests may not be reset.

        Raises:
            RequestError: the argument is neither True nor False.
        """
        if not isinstance(reset_running_requests, bool):
            raise RequestError(
                f"reset_running_requests = {reset_running_requests!r:.100}: must be True or False",
                param="reset_running_requests",
            )
        return bool(self.engine.reset_prefix_cache(reset_running_requests))

    def start_profile(self) -> None:
        """Record the coming steps (``profiler_config``)."""
        self.collective_rpc("start_profile")

    def stop_profile(self) -> None:
        """Write what was recorded."""
        self.collective_rpc("stop_profile")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker: results by rank.

        Args:
            method: the name of a method that may be called; or a function that gets the worker before
                ``args``, for an engine in this process. The worker has ``rank``, ``device`` and
                ``get_model()``. The function runs between two steps: nothing else runs meanwhile, so it
                can neither call this object nor wait for a thread that does.
            timeout: seconds; None: ten minutes. What was called goes on after it.

        Raises:
            RequestError: the method may not be called, or the arguments do not fit.
            UnsupportedFeature: a function, and the engine is in another process.
            EngineError: the function would have ended the worker (``sys.exit()``), or called this object.
            TimeoutError: there was no answer in time.
        """
        method, args = as_worker_call(method, args, kwargs)
        return list(self.engine.collective_rpc(method, args=args, timeout=as_timeout(timeout)))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Run a function on the model of every worker: results by rank.

        >>> llm.apply_model(type)  # whose code runs the model

        Raises:
            RequestError: it is not a function.
            UnsupportedFeature: the engine is in another process.
            EngineError: as :meth:`collective_rpc`.
        """
        if not callable(func):
            raise RequestError(f"func = {func!r:.100}: must be a function", param="func")
        return list(self.engine.apply_model(func))
