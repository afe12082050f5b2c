"""A rank's part in changes of weights that rank 0 leads: each method is a step, and undoes nothing of what
other steps did but where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace_core.errors import HeadraceError, ModelError, WeightsError
from headrace_core.model import CausalLM
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.weights.beside import PartOfProbe
from headrace_engine.weights.changing import ChangingWorker
from headrace_engine.weights.led_calls import STEPS
from headrace_engine.weights.rank_parts import taken
from headrace_engine.weights.update_set import Undo
from headrace_engine.worker.settings import WorkerSettings


class FollowsChanges(ChangingWorker):
    """A worker of a rank other than 0. One thread only, but for :meth:`build_share`."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._probe: PartOfProbe | None = None
        self._serving: tuple[CausalLM | None, ModelRunner | None] | None = None
        """Model and runner whose place the candidate's have for a pass of a probe."""
        self._unstage: Undo | None = None
        """Undoes the last :meth:`stage_share`."""
        self._take_out: Undo | None = None
        """Undoes :meth:`put_share`, until the new weights are kept."""

    def change_weights(self, step: str, *args: Any) -> Any:
        """Do a step of a change.

        Args:
            step: one of :data:`~headrace_engine.weights.led_calls.STEPS`.

        Raises:
            HeadraceError, MemoryError: the step's own.
            ModelError: there is no such step.
        """
        if step not in STEPS:
            raise ModelError(f"{step!r} is not a step of a change of weights")
        with _as_ours():
            return getattr(self, step)(*args)

    def build_share(self, path: str) -> int:
        """Build this rank's share of a candidate: its bytes. In a thread of its own.

        Raises:
            HeadraceError: it cannot be built, or is not wanted any more.
        """
        with _as_ours():
            return self._build_candidate(path)

    def stop_building(self) -> None:
        """Nobody wants the candidate that is being built."""
        self._models_beside().stop()

    def open_probe(self, length: int) -> None:
        """Give the candidate a cache for probes of so many tokens."""
        assert self._cache is not None
        with self._models_beside().telling():
            self._probe = self._models_beside().own_part_of_trial(length, self._cache)

    def follow_probe(self, follow: bool) -> None:
        """From now on passes are the candidate's; False: those of the model that serves."""
        if follow:
            assert self._probe is not None, "open_probe() comes first"
            self._serving = self._model, self._runner
            self._model, self._runner = self._probe.runner.model, self._probe.runner
        elif self._serving is not None:
            self._model, self._runner = self._serving
            self._serving = None

    def close_probe(self) -> None:
        """Take the cache of probes away. Idempotent."""
        self.follow_probe(False)
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cache.close()

    def drop_share(self) -> None:
        """Forget the candidate; the model that served before serves. Idempotent."""
        self.close_probe()
        self._drop_candidate()

    def expect_tensors(self) -> None:
        """Have a model that can get new weights."""
        self._make_blank()

    def stage_share(self, told: Mapping[str, Any], keep: bool) -> None:
        """Take a part of an update; see :func:`headrace_engine.weights.rank_parts.taken`."""
        self._unstage = None
        self._unstage = self._new_weights.take_share(taken(told), keep)

    def unstage_share(self) -> None:
        """Undo the last :meth:`stage_share`, if it has taken something."""
        undo, self._unstage = self._unstage, None
        if undo is not None:
            undo()

    def seal_share(self) -> None:
        """Check that the update is whole, and pack what waits; nothing, if it is of what guesses only, which
        is rank 0's."""
        self._unstage = None
        if self._new_weights.held.staged:
            self._new_weights.seal()

    def put_share(self) -> None:
        """Put the new weights in."""
        self._take_out = None
        if not self._new_weights.held.staged:
            return
        self._take_out = self._new_weights.apply()
        if self._runner is None:
            self._hold(self._new_weights.model)
        else:
            self._weights_are_others()

    def take_share_out(self) -> None:
        """Undo :meth:`put_share`; steps are not recorded any more."""
        undo, self._take_out = self._take_out, None
        if undo is None:
            return
        undo()
        if self._runner is None:
            self._hold_nothing()
        else:
            self._weights_are_others()

    def keep_share(self) -> None:
        """Let go of the weights before."""
        self._take_out = None
        self._return_memory()

    def drop_shares(self) -> None:
        """Forget all tensors that have come."""
        self._unstage = None
        self._new_weights.drop()


@contextmanager
def _as_ours() -> Iterator[None]:
    """Has what the block raises be an error of ours: rank 0 would take any other one for this rank's end."""
    try:
        yield
    except (HeadraceError, MemoryError):
        raise
    except Exception as error:
        raise WeightsError(f"{type(error).__name__}: {error}") from error
