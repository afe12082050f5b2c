"""New weights of a model and of what guesses for it, which go in together: :class:`UpdateSet`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from headrace_core.errors import UnsupportedFeature, WeightsError
from headrace_core.model import CausalLM
from headrace_engine.weights.messages import DRAFT, MODEL

Undo = Callable[[], None]
Part = Sequence[tuple[str, Tensor]]
"""Name and tensor."""


class WeightUpdate(Protocol):
    """New weights of one model or head, until they are put in or dropped."""

    @property
    def num_tensors(self) -> int: ...
    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> None: ...
    def check_values(self, name: str, tensor: Tensor) -> None: ...
    def checkpoint(self) -> Undo: ...
    def checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Part: ...
    def take_checked(self, part: Part, *, keep: bool = True) -> None: ...
    def check_whole(self) -> None: ...
    def keep_waiting(self) -> None: ...
    def seal(self) -> None: ...
    def apply(self) -> Undo: ...


class LoadedModel(Protocol):
    """A model, or a head, of which it is known how it was loaded."""

    @property
    def model(self) -> CausalLM: ...
    @property
    def max_bytes(self) -> int:
        """Of all tensors that it may be given, about."""
        ...

    @property
    def max_tensors(self) -> int:
        """Tensors that it may be given, about."""
        ...

    def update(self) -> WeightUpdate:
        """Begin an update.

        Raises:
            UnsupportedFeature: the model cannot be updated.
        """
        ...


class UpdateSet:
    """One update, from its first tensor until it is applied or dropped.

    Args:
        model: that is to get new weights; None: it cannot.
        draft: what guesses for it, if that has weights.
        within: the tensors of ``draft`` are in the model's checkpoint, and come among the model's.
    """

    def __init__(
        self, model: LoadedModel | None, draft: LoadedModel | None, *, within: bool
    ) -> None:
        self._loaded = {MODEL: model, DRAFT: draft}
        self._within = within
        self._updates: dict[str, WeightUpdate] = {}

    @property
    def num_tensors(self) -> int:
        """Tensors that were taken."""
        return sum(update.num_tensors for update in self._updates.values())

    @property
    def targets(self) -> frozenset[str]:
        """What gets tensors."""
        return frozenset(t for t, update in self._updates.items() if update.num_tensors)

    def check(self, target: str, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Check a tensor that is to come, by what is said of it.

        Raises:
            WeightsError, UnsupportedFeature: as :meth:`take`.
        """
        for update in self._of(target):
            update.check(name, shape, dtype)

    def check_values(self, name: str, tensor: Tensor) -> None:
        """Check the numbers of a tensor of which it is not said yet for whom it is.

        Raises:
            WeightsError: they are not finite.
        """
        self._update(MODEL).check_values(name, tensor)

    def take(
        self, target: str, tensors: Iterable[tuple[str, Tensor]], *, keep: bool = True
    ) -> None:
        """Take a part, all of which is checked before any of it is taken. If that raises, the update is what
        it was before.

        Args:
            target: :data:`~headrace_engine.weights.messages.MODEL` or ``DRAFT``.
            keep: tensors that wait for others are copied, so that the caller may write over theirs.

        Raises:
            WeightsError: a tensor is unknown, repeated, of the wrong shape or dtype, or not finite.
            UnsupportedFeature: the target takes none.
            MemoryError: the system has no memory for them.
        """
        updates = self._of(target)
        if len(updates) > 1:
            tensors = list(tensors)
        parts = [(update, update.checked(tensors)) for update in updates]
        with contextlib.ExitStack() as undo:
            for update, _ in parts:
                undo.callback(update.checkpoint())
            for update, part in parts:
                update.take_checked(part, keep=keep)
            undo.pop_all()

    def checkpoint(self) -> Undo:
        """A call that has the update be what it is now."""
        before = {target: update.checkpoint() for target, update in self._updates.items()}

        def restore() -> None:
            for target in [*self._updates]:
                if target in before:
                    before[target]()
                else:
                    del self._updates[target]

        return restore

    def begin(self, target: str) -> None:
        """Have the update be of this target, too, whose tensors are missing until they come."""
        self._update(target)

    def keep_waiting(self) -> None:
        """Copy tensors that wait and were taken with ``keep=False``."""
        for update in self._updates.values():
            update.keep_waiting()

    def seal(self) -> None:
        """Pack what has waited for tensors that need not come.

        Raises:
            WeightsError: tensors are missing; more may be taken, and this called again. Or a layer cannot use
                its tensors, which wait on.
            MemoryError: the system has no memory for them; they wait on.
        """
        for update in self._updates.values():
            update.check_whole()
        for update in self._updates.values():
            update.seal()

    def apply(self) -> Undo:
        """Put the weights in; :meth:`seal` comes first. Returns a call that takes them out again.

        Raises:
            WeightsError: they cannot be used; the old ones stand.
        """
        undo = contextlib.ExitStack()
        try:
            for target in (MODEL, DRAFT):  # a head reads the model's
                if target in self.targets:
                    undo.callback(self._updates[target].apply())
        except BaseException:
            undo.close()
            raise
        return undo.close

    def _of(self, target: str) -> list[WeightUpdate]:
        """The updates that get the tensors of a target."""
        if target == DRAFT and (self._within or self._loaded[DRAFT] is None):
            raise UnsupportedFeature(
                f"target = 'draft': {_NOT_APART[self._within]}", param="target"
            )
        both = target == MODEL and self._within
        return [self._update(one) for one in ((MODEL, DRAFT) if both else (target,))]

    def _update(self, target: str) -> WeightUpdate:
        loaded = self._loaded[target]
        if loaded is None:
            raise no_updates()
        if target not in self._updates:
            self._updates[target] = loaded.update()
        return self._updates[target]


_NOT_APART = {
    True: "what guesses is layers of the model's checkpoint: leave target out, and send their tensors among "
    "the model's",
    False: "nothing with weights of its own guesses here (speculative_config.model): leave target out",
}


def check_any(updates: UpdateSet, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """Check a tensor of which it is not said yet for whom it is.

    Raises:
        WeightsError, UnsupportedFeature: the model does not take it, nor does what guesses.
    """
    try:
        updates.check(MODEL, name, shape, dtype)
    except WeightsError:
        try:
            updates.check(DRAFT, name, shape, dtype)
        except (WeightsError, UnsupportedFeature):
            pass
        else:
            return
        raise


def no_updates() -> UnsupportedFeature:
    """The refusal of a worker whose model stays as it is."""
    return UnsupportedFeature("update_weights: this worker reads its weights once", param="weights")
