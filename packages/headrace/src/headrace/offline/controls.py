"""Calls that steer a running engine, the same for ``LLM`` and ``LLMEngine``: :class:`EngineControls`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from headrace.offline.arguments import WAKING_TIMEOUT, as_tags, as_timeout, as_worker_call
from headrace.offline.new_weights import Weights, update_offline
from headrace.offline.swapping import SWAP_TIMEOUT, WeightsProbe, probe_prompts, swap_options
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

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and cache back to the system. No request may run.

        Args:
            level: 1: :meth:`wake_up` reads the checkpoint again; 2: only ``reload_weights`` does.

        Raises:
            UnsupportedFeature: the engine was started without ``enable_sleep_mode=True``.
            RequestError: there is no such level, requests run, or a part sleeps at another level.
        """
        self.engine.collective_rpc("sleep", args=[level], timeout=WAKING_TIMEOUT)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again; for what is awake nothing happens.

        Args:
            tags: parts to wake, ``weights`` and ``kv_cache``; None: all. Requests are served when
                both are awake, and not before ``collective_rpc("reload_weights")`` after level 2.

        Raises:
            UnsupportedFeature: the engine was started without ``enable_sleep_mode=True``.
            RequestError: there is no such tag, or the weights sleep and ``kv_cache`` alone is to wake.
            WeightsError: the checkpoint cannot be read again; the weights sleep on.
        """
        self.engine.collective_rpc("wake_up", args=[as_tags(tags)], timeout=WAKING_TIMEOUT)

    def is_sleeping(self) -> bool:
        """True until every part is awake."""
        return bool(self.engine.collective_rpc("is_sleeping")[0])

    def update_weights(
        self,
        weights: Weights | None = None,
        *,
        finish: bool = True,
        mode: str | None = None,
        version: str | None = None,
        target: str = "model",
    ) -> dict[str, Any]:
        """Give the model new weights, or a part of them; see docs/training-loops.md.

        They have the names, shapes and types that the checkpoint has. All are checked before the model
        changes, and they go in together: a call that raises leaves the old ones.

        >>> llm.update_weights(policy.state_dict())

        Args:
            weights: by name, a mapping or pairs; or what :mod:`headrace.weight_transfer` says of tensors that
                come another way, whose own ``finish``, ``version`` and ``target`` count. None: no further
                ones.
            finish: put in what has come. False: a part, to which others will be added.
            mode: with requests that run, of other threads or of ``add_request``, when the update finishes.
                None: they are an error. ``keep``: they go on with the new weights. ``wait``: they end first,
                with the old ones. ``abort``: they end now, with finish reason ``abort``. With the latter two,
                requests of other threads that come meanwhile begin afterwards.
            version: name of the new weights; None: the one before, counted up.
            target: ``draft``: the tensors are of the model or head of ``speculative_config.model``, by its
                checkpoint's names. Outputs do not depend on it, so that requests may run, and the version
                stays. An update may have parts for both.

        Returns:
            ``num_tensors`` of the update so far, whether it has ``finished``, and the ``weights_version``
            that computes now.

        Raises:
            RequestError: a tensor is unknown, missing, of another shape or type, or not finite; an
                argument is wrong; requests run.
            UnsupportedFeature: the model cannot be updated.
        """
        options: dict[str, Any] = {"finish": finish, "version": version, "target": target}
        return update_offline(self.engine, weights, mode, **options)

    def cancel_weight_update(self) -> None:
        """Forget the parts of an update that has not finished; the model stays as it is."""
        self.engine.collective_rpc("update_weights", args=[{"cancel": True}])

    @property
    def weights_version(self) -> str:
        """Version of the weights that compute now; ``0`` until somebody names others."""
        return str(self.engine.collective_rpc("weights_version")[0])

    def set_weights_version(self, version: str) -> None:
        """Name the weights, after they were changed (``reload_weights``, ``apply_model``): outputs tell the
        version, and cached prefixes are not found again.

        Args:
            version: 1 to 128 printable characters; with the one that they have, prefixes are forgotten.

        Raises:
            RequestError: it is something else.
        """
        self.engine.collective_rpc("set_weights_version", args=[version])

    def swap_weights(
        self,
        path: str | PathLike[str],
        *,
        weights_version: str | None = None,
        drain_timeout: float | None = None,
        probe: Sequence[WeightsProbe | tuple[str | Sequence[int], Sequence[int]]] | None = None,
        max_perplexity: float | None = None,
    ) -> dict[str, Any]:
        """Serve with another checkpoint of the same model: it is read beside the running weights, checked,
        and put in their place between two steps. Requests under way end on the old weights, later ones wait
        meanwhile. Whatever fails leaves the old weights in place.

        It costs the memory of the new weights beside the old ones until they have changed places.

        Args:
            path: folder or file, on the machine of the engine.
            weights_version: the new weights' name; None: the next number.
            drain_timeout: seconds that requests under way have to end, else the swap is given up; None: 60.
            probe: pairs (prompt, token ids that must be its greedy continuation; () expects none).
            max_perplexity: most that the new weights may have on the probe's prompts.

        Returns:
            ``weights_version``, ``previous_version``, ``bytes``, ``perplexity``, ``seconds`` by phase.

        Raises:
            RequestError: the checkpoint does not fit, has a fault, fails its probe or needs more memory than
                is free; requests did not end in time; another swap is under way.
            UnsupportedFeature: the engine's workers read their weights once.
        """
        given = () if probe is None else probe
        tokens = [self.engine.tokenize(prompt) for prompt in probe_prompts(given)]
        options = swap_options(
            path, given, tokens, weights_version=weights_version, drain_timeout=drain_timeout,
            max_perplexity=max_perplexity,
        )  # fmt: skip
        found = self.engine.collective_rpc("swap_weights", args=[options], timeout=SWAP_TIMEOUT)
        return dict(found[0])

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
