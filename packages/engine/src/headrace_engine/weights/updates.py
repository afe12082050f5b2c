"""Updates of an engine's weights, in the order in which their steps may come. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from headrace_core.errors import CapacityError, RequestError, WeightsError
from headrace_core.executor import Executor
from headrace_engine.sleep.engine_sleep import EngineSleep
from headrace_engine.weights.messages import BROADCAST, WeightsMessage
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
    def expect_weights(self, message: WeightsMessage) -> None: ...
    def receive_weights(self, message: WeightsMessage) -> None: ...
    def held_weights(self) -> tuple[int, int]: ...
    def weights_woke(self) -> None: ...
    def update_changes_model(self) -> bool: ...
    def seal_weights(self) -> None: ...
    def apply_weights(self, keep_requests: bool) -> None: ...
    def refuse_weights(self) -> None: ...
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
        self._beside: dict[str, Future[list[Any]]] = {}
        """Calls that run beside steps, by their names: the last of each."""
        self.may_hold = False
        """Tensors may have come: workers that cannot be updated are not asked."""
        self.are_from_outside = False
        """The model's weights are not those of the checkpoint."""

    def call(self, method: str, args: Sequence[Any]) -> list[Any]:
        """One of :data:`CALLS`, but for :data:`JOIN`: results by rank.

        Raises:
            RequestError: the update cannot be taken; the weights, and parts that came before, are as they
                were. CapacityError: there is no memory for it.
        """
        if method != UPDATE:
            return self._call_way(method, args)
        message = WeightsMessage.parse(args[0])
        if message.cancel:
            self._executor.call("drop_weights")
            self.may_hold = False
            return []
        self._sleep.check_may_update()
        self._check_not_receiving(UPDATE)
        began = not (self.may_hold and self._held()[0])
        try:
            return self._update(message, began)
        except BaseException as error:
            if began and self.may_hold:  # what came in a single call, and was refused, is not kept
                self._executor.call("refuse_weights")
            raise _for_caller(error) from error

    def call_beside(self, method: str, args: Sequence[Any]) -> Future[list[Any]]:
        """Join a trainer's group (:data:`JOIN`), or receive what a broadcast brings, before :data:`UPDATE` is
        called with the same arguments. Steps go on meanwhile.

        Raises:
            RequestError: it cannot be done now.
        """
        for name, what in ((JOIN, "a group is being joined"), (UPDATE, _RECEIVING)):
            if self._is_beside(name):
                raise RequestError(
                    f"{method}: {what}: must wait until that has ended", param="method"
                )
        if method == JOIN:
            self._beside[JOIN] = self._executor.call_beside(JOIN, *args)
            return self._beside[JOIN]
        message = WeightsMessage.parse(args[0])
        self._sleep.check_may_update()
        try:
            self._executor.call("expect_weights", message)
        except BaseException as error:
            raise _for_caller(error) from error
        self.may_hold = True
        received, told = self._executor.call_beside("receive_weights", message), Future[list[Any]]()

        def tell(future: Future[list[Any]]) -> None:
            if (error := future.exception()) is None:
                told.set_result(future.result(0))
            else:
                told.set_exception(_for_caller(error))

        received.add_done_callback(tell)
        self._beside[UPDATE] = received
        return told

    def check_none_open(self, call: str) -> None:
        """Raises: RequestError, tensors of an update have come, or are on their way, and ``call`` would come
        between."""
        self._check_not_receiving(call)
        staged, waiting = self._held() if self.may_hold else (0, 0)
        if staged or waiting:
            raise RequestError(
                f"{call}: an update of the weights is open ({staged} tensors were taken, {waiting} wait): "
                "must be finished or cancelled before (update_weights with finish or cancel, or "
                "LLM.cancel_weight_update())",
                param="method",
            )

    def woke(self) -> None:
        """Parts of the engine have woken. A stream that was opened before goes on."""
        if self.may_hold and self._sleep.awaits_weights:
            self._executor.call("weights_woke")

    def swapped(self) -> None:
        """Another checkpoint's model has taken the place of the one before."""
        self.are_from_outside = False

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

    def _call_way(self, method: str, args: Sequence[Any]) -> list[Any]:
        if method == "open_weight_stream":
            self._sleep.check_may_update(method)
            self._check_not_receiving(method)
        results = self._executor.call(method, *args)
        self.may_hold = True
        return results

    def _update(self, message: WeightsMessage, began: bool) -> list[Any]:
        counts = self._executor.call("stage_weights", message)
        self.may_hold = True
        if not message.finish:
            if message.prepare:
                self._executor.call("seal_weights")
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

    def _held(self) -> tuple[int, int]:
        """The most tensors of an open update that a worker has taken, and that wait at one."""
        staged, waiting = zip(*self._executor.call("held_weights"), strict=True)
        return max(staged), max(waiting)

    def _is_beside(self, method: str) -> bool:
        return method in self._beside and not self._beside[method].done()

    def _check_not_receiving(self, call: str) -> None:
        if self._is_beside(UPDATE):
            raise RequestError(
                f"{call}: {_RECEIVING}: must wait until they have come, or be cancelled "
                "(LLM.cancel_weight_update())",
                param="method",
            )


_RECEIVING = "tensors of a broadcast are on their way"


def comes_by_broadcast(args: Sequence[Any]) -> bool:
    """True if tensors of such a call of :data:`UPDATE` are to be received first."""
    is_message = len(args) == 1 and isinstance(args[0], Mapping)
    return is_message and args[0].get("source") == BROADCAST and args[0].get("cancel") is not True


def _for_caller(error: BaseException) -> BaseException:
    """The error that whoever asked for an update gets."""
    if isinstance(error, WeightsError):
        return RequestError(str(error), param="weights")
    return CapacityError(str(error)) if isinstance(error, MemoryError) else error


def keeps_no_weights() -> RequestError:
    """The refusal of a sleep from which weights of ``update_weights`` would not wake."""
    return RequestError(
        "level = 1: the weights came by update_weights, and waking would read those of the checkpoint: must "
        "be 2, with update_weights or reload_weights after waking",
        param="level",
    )
