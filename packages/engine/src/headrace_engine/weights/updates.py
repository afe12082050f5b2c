"""Updates of an engine's weights, in the order in which their steps may come. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace_core.errors import RequestError, WeightsError
from headrace_core.executor import Executor
from headrace_engine.sleep.engine_sleep import EngineSleep
from headrace_engine.weights.messages import WeightsMessage
from headrace_engine.weights.version import WeightsVersion, counted_up

UPDATE = "update_weights"
JOIN = "init_weight_update_group"
PARAMETERS = {
    UPDATE: ("update",),
    JOIN: ("master_address", "master_port", "rank_offset", "world_size"),
}
CALLS = {
    UPDATE: 1, JOIN: len(PARAMETERS[JOIN]), "open_weight_stream": 0, "close_weight_transfer": 0,
}  # fmt: skip
"""Calls for new weights from outside, and how many arguments each takes."""


class UpdatedWorker(Protocol):
    """Methods of a worker beside :class:`headrace_core.executor.Worker` that an update needs. See
    :class:`headrace_engine.weights.holder.WeightHolder`."""

    def stage_weights(self, message: WeightsMessage) -> int: ...
    def update_changes_model(self) -> bool: ...
    def seal_weights(self) -> None: ...
    def apply_weights(self, keep_requests: bool) -> None: ...
    def drop_weights(self) -> None: ...


class RunningRequests(Protocol):
    """The core, as updates see it."""

    @property
    def has_unfinished(self) -> bool: ...
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...
    def weights_changed(self, version: str) -> None: ...


class EngineUpdates:
    """Puts new weights into an engine. Belongs to the core's thread; no step is in flight.

    Args:
        executor: its workers are :class:`UpdatedWorker`.
        sleep: of the same engine.
        requests: of the same engine.
        version: of its weights.
    """

    def __init__(
        self,
        executor: Executor,
        sleep: EngineSleep,
        requests: RunningRequests,
        version: WeightsVersion,
    ) -> None:
        self._executor = executor
        self._sleep = sleep
        self._requests = requests
        self._version = version
        self._under_way = False
        self.are_from_outside = False
        """The model's weights are not those of the checkpoint."""

    def call(self, method: str, args: Sequence[Any]) -> list[Any]:
        """One of :data:`CALLS`: results by rank.

        Raises:
            RequestError: the update cannot be taken; the weights are as they were.
        """
        if method != UPDATE:
            return self._executor.call(method, *args)
        message = WeightsMessage.parse(args[0])
        try:
            return self._update(message)
        except WeightsError as error:
            self._forget_if_new()
            raise RequestError(str(error), param="weights") from error
        except BaseException:
            self._forget_if_new()
            raise

    def forget(self) -> None:
        """There is another model, for which nothing has come."""
        self._under_way = False

    def swapped(self) -> None:
        """Another checkpoint's model has taken the place of the one before."""
        self._under_way = self.are_from_outside = False

    def reloaded(self) -> None:
        """The weights are those of the checkpoint again: not those that the version names, if it names
        others."""
        if self.are_from_outside:
            self.are_from_outside = False
            self._requests.weights_changed(counted_up(self._version.current))

    def check_sleep(self, level: int) -> None:
        """Raises: RequestError, waking from this level would bring other weights back."""
        if level == 1 and self.are_from_outside:
            raise keeps_no_weights()

    def _update(self, message: WeightsMessage) -> list[Any]:
        if message.cancel:
            self.forget()
            self._executor.call("drop_weights")
            return []
        self._sleep.check_may_update()
        if message.source is None:  # an extension may have taken some
            self._under_way = True
        began = not self._under_way
        counts = self._executor.call("stage_weights", message)
        if not message.finish:
            self._under_way = True
            return self._answers(counts, began, finished=False)
        # What only guesses changes no output.
        changes = any(self._executor.call("update_changes_model"))
        if changes and self._requests.has_unfinished and not message.keep_requests:
            raise RequestError(
                "update_weights: must wait until no request runs: pause first, or let those that run go on "
                "with the new weights (mode='keep')",
                param="mode",
            )
        self._executor.call("seal_weights")
        holds = not changes or self._requests.has_unfinished
        if not holds:
            self._requests.reset_prefix_cache()
        self._executor.call("apply_weights", holds)
        self._under_way = False
        if changes:
            self.are_from_outside = True
            self._sleep.weights_came()
            self._requests.weights_changed(message.version or counted_up(self._version.current))
        return self._answers(counts, began, finished=True)

    def _answers(self, counts: Sequence[int], began: bool, *, finished: bool) -> list[Any]:
        """For each worker: the tensors of the update that it has had, whether the update began with this call
        and has ended with it, and the version of the weights that compute now."""
        version = self._version.current
        return [
            {"num_tensors": n, "began": began, "finished": finished, "weights_version": version}
            for n in counts
        ]

    def _forget_if_new(self) -> None:
        """What came in a single call, and was refused, is not kept; parts that came before it are."""
        if not self._under_way:
            self._executor.call("drop_weights")


def keeps_no_weights() -> RequestError:
    """The refusal of a sleep from which weights of ``update_weights`` would not wake."""
    return RequestError(
        "level = 1: the weights came by update_weights, and waking would read those of the checkpoint: must "
        "be 2, with update_weights or reload_weights after waking",
        param="level",
    )
