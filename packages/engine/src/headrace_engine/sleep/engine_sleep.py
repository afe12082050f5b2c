"""The states of an engine that can sleep, and the order in which they may come. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headrace_core.errors import EngineAsleep, RequestError, UnsupportedFeature
from headrace_core.executor import Executor

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""Parts that may be woken one by one."""
LEVELS = (1, 2)
"""1: waking reads the checkpoint again. 2: weights come only with ``reload_weights``."""
CALLS = ("sleep", "wake_up", "reload_weights")
"""Calls of workers that free memory or take it; no step may be in flight, and they may take minutes."""


class SleepingWorker(Protocol):
    """Methods of a worker beside :class:`headrace_core.executor.Worker` that sleep needs."""

    def give_back_memory(self, keep: bool = False) -> None:
        """Return the memory of weights and cache to the system or device.

        Args:
            keep: the weights may be kept in the host's memory, if that is not where they are; what
                waking does then is little.
        """
        ...

    def read_weights(self, changed: bool) -> None:
        """Build the model without a cache.

        Args:
            changed: as :meth:`headrace_core.executor.Worker.update_config` said last; False: as the
                weights before were read.
        """
        ...

    def restore_cache(self) -> bool:
        """Allocate the cache under its old plan. True: ``warm_up()`` must come next, on all ranks."""
        ...


class EngineSleep:
    """What of an engine sleeps. Belongs to the core's thread; whoever calls has made sure that no
    request is under way.

    Args:
        executor: its workers are :class:`SleepingWorker`, if sleep is enabled.
        enabled: ``device.enable_sleep_mode``.
    """

    def __init__(self, executor: Executor, enabled: bool) -> None:
        self._executor = executor
        self._enabled = enabled
        self._level = 0
        self._asleep: set[str] = set()
        self._missing = False
        """The weights were given up, at level 2 or for others that could not be read, and none were read
        since."""
        self._had_weights = True
        """There were some before the last call of :meth:`sleep`."""

    @property
    def level(self) -> int:
        """The level of the last sleep, until requests are served again; 0 then."""
        return self._level if self._asleep or self._missing else 0

    @property
    def is_sleeping(self) -> bool:
        """True until every part is awake."""
        return bool(self._asleep)

    def check_awake(self) -> None:
        """Raises: EngineAsleep, requests cannot be computed now; says what has to be called first."""
        if self._asleep:
            raise EngineAsleep(
                f"the engine sleeps ({self._parts()}) and takes no requests: wake_up() comes first"
            )
        if self._missing:
            raise EngineAsleep(
                "the engine has no weights (it slept at level 2, or could not read them again) and takes no "
                "requests: reload_weights comes first"
            )

    def check_sleep(self, level: object) -> int:
        """The level, if the engine may be put to sleep so now.

        Raises:
            UnsupportedFeature: the engine cannot sleep.
            RequestError: there is no such level, or a part sleeps at another one.
        """
        self._check_enabled("sleep")
        if not isinstance(level, int) or isinstance(level, bool) or level not in LEVELS:
            raise RequestError(f"level = {level!r:.100}: must be 1 or 2", param="level")
        if self._asleep and (len(self._asleep) < len(TAGS) or level != self._level):
            raise RequestError(
                f"sleep: the engine sleeps already ({self._parts()}, level {self._level}): wake_up() "
                "comes first",
                param="level",
            )
        return level

    def sleep(self, level: int) -> None:
        """Give the memory back; nothing happens if all sleeps at this level.

        Args:
            level: of :meth:`check_sleep`.
        """
        self._had_weights = not self._missing
        if self._asleep:
            return
        self._executor.call("give_back_memory", level == LEVELS[0])
        self._asleep, self._level = set(TAGS), level
        self._missing = self._missing or level == LEVELS[-1]

    def check_wake_up(self, tags: object) -> set[str]:
        """The parts that are to be woken.

        Raises:
            UnsupportedFeature: the engine cannot sleep.
            RequestError: there is no such tag; or the cache would be woken before the weights.
        """
        self._check_enabled("wake_up")
        wanted = self._asleep.intersection(_checked(tags))
        if wanted == {KV_CACHE} and WEIGHTS in self._asleep:
            raise RequestError(
                "tags = ['kv_cache']: the weights sleep, and the cache lies beside them: wake 'weights' "
                "first, or both at once",
                param="tags",
            )
        return wanted

    def wake_up(self, tags: object) -> None:
        """Take memory again, for some parts or (None) all; for those that are awake nothing happens.
        A part whose waking raises sleeps on.

        Raises:
            UnsupportedFeature, RequestError: see :meth:`check_wake_up`.
            WeightsError, CapacityError: from the workers.
        """
        wanted = self.check_wake_up(tags)
        for tag in (tag for tag in TAGS if tag in wanted):
            if not self._missing:  # else with the weights
                self._wake(tag)
            self._asleep.discard(tag)

    def check_reload(self) -> None:
        """Raises: RequestError: the weights sleep, so that there is no memory to read them into."""
        if WEIGHTS in self._asleep:
            raise RequestError(
                "method = 'reload_weights': the weights sleep: wake_up(tags=['weights']) comes first",
                param="method",
            )

    def reload_weights(self) -> list[Any]:
        """Read the weights, and restore the cache if it is awake: results by rank. If that fails, the engine
        has none until a later call reads some: the old ones go first.

        Raises:
            RequestError: the weights sleep.
            WeightsError, CapacityError: from the workers.
        """
        self.check_reload()
        if not self._asleep and not self._missing:
            try:
                return self._executor.call("reload_weights")
            except UnsupportedFeature:  # nothing has gone
                raise
            except BaseException:
                self._missing, self._level = True, LEVELS[-1]
                raise
        self._missing = True  # should reading fail
        results = self._executor.call("read_weights", True)
        if KV_CACHE not in self._asleep:
            self._wake(KV_CACHE)
        self._missing = False
        return results

    def take_back(self, call: str, cause: BaseException) -> None:
        """A call that several engines were to obey failed on one of them: be as all of them are after that.

        They are awake after ``sleep``, wholly asleep after ``wake_up``, and without weights after
        ``reload_weights``, unless it was one that no engine could obey.

        Args:
            call: of :data:`CALLS`.
            cause: of this engine, or of another one.

        Raises:
            WeightsError, CapacityError: from the workers, which then sleep on.
        """
        if isinstance(cause, UnsupportedFeature | RequestError):
            return
        if call == "sleep":
            if self._asleep:
                self._missing = not self._had_weights
                self.wake_up(None)
            return
        self._executor.call("give_back_memory", False)
        if call == "wake_up":
            self._asleep = set(TAGS)
        else:
            self._missing, self._level = True, LEVELS[-1]

    @property
    def awaits_weights(self) -> bool:
        """True if there is memory for weights, and there are none."""
        return self._missing and WEIGHTS not in self._asleep

    def check_may_update(self, call: str = "update_weights") -> None:
        """Raises: RequestError, there is no memory for new weights now."""
        if WEIGHTS in self._asleep:
            raise RequestError(
                f"{call}: the weights sleep: wake_up(tags=['weights']) comes first",
                param="method",
            )

    def weights_came(self) -> None:
        """New weights are in their place, of a model that had none if it slept at level 2: restore the
        cache then, if it is awake."""
        if self._missing and KV_CACHE not in self._asleep:
            self._wake(KV_CACHE)
        self._missing = False

    def _wake(self, tag: str) -> None:
        if tag == WEIGHTS:
            self._executor.call("read_weights", False)
        elif any(self._executor.call("restore_cache")):
            self._executor.call("warm_up")

    def _parts(self) -> str:
        return ", ".join(tag for tag in TAGS if tag in self._asleep)

    def _check_enabled(self, call: str) -> None:
        if not self._enabled:
            raise UnsupportedFeature(
                f"{call}: this engine cannot sleep; start it with enable_sleep_mode=True "
                "(--enable-sleep-mode)"
            )


def _checked(tags: object) -> Sequence[str]:
    """Tags that exist; None: all.

    Raises:
        RequestError: it is something else.
    """
    if tags is None:
        return TAGS
    if not isinstance(tags, (list, tuple)) or not tags or not all(tag in TAGS for tag in tags):
        raise RequestError(
            f"tags = {tags!r:.200}: must be a list of {' or '.join(map(repr, TAGS))}, or None for all",
            param="tags",
        )
    return tags
