"""The worker's side of an update: what has come of it, and the ways it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from headrace_core.errors import RequestError
from headrace_core.lora import AdapterSlots
from headrace_core.model import CausalLM
from headrace_engine.execution.refusal import memory_errors
from headrace_engine.weights.broadcast import WeightGroup, check_member
from headrace_engine.weights.messages import (
    DRAFT,
    MODEL,
    TensorPlace,
    WeightsMessage,
    checked_name,
)
from headrace_engine.weights.part_limits import PartLimits
from headrace_engine.weights.plain_tensors import plain
from headrace_engine.weights.shared_memory import read_shared
from headrace_engine.weights.stream import Part, WeightStream
from headrace_engine.weights.update_set import (
    LoadedModel,
    Undo,
    UpdateSet,
    check_any,
    no_updates,
)

Spread = Callable[[UpdateSet, Iterable[tuple[str, Tensor]], bool], None]
"""Takes tensors into rank 0's update and into that of every other rank, or into none; see
:meth:`UpdateSet.take`."""


class HeldWeights(NamedTuple):
    """Tensors of an update that is open."""

    staged: int
    """Taken."""
    waiting: int
    """Come over the stream or by a broadcast, and not taken yet."""


class WeightHolder:
    """Belongs to a worker, and to its thread, but for :meth:`join_group` and :meth:`receive`.

    Args:
        make_blank: builds the model without weights, given the slots of its adapters if there are any.
        within: what guesses is layers of the model's checkpoint, so that their tensors come among the
            model's.
    """

    def __init__(
        self, make_blank: Callable[..., LoadedModel] | None = None, *, within: bool = False
    ) -> None:
        self._make_blank = make_blank
        self._within = within
        self._loaded: LoadedModel | None = None
        self._draft: LoadedModel | None = None
        self._update: UpdateSet | None = None
        self._group: WeightGroup | None = None
        self._stream: WeightStream | None = None
        self._received: list[tuple[str, Tensor]] = []
        """Came by a broadcast, and waits for :meth:`stage`."""
        self._streamed: list[Part] = []
        """Parts of the stream that the last :meth:`stage` took."""
        self._unwanted = threading.Event()
        """Set: what is being received is not wanted any more."""
        self._left = threading.Event()
        """Set: the group that is being joined is not wanted any more."""
        self.draft_is_from_outside = False
        """What guesses has weights that are not those of its checkpoint."""
        self._is_blank = False
        """The model has no weights yet."""
        self._checks: UpdateSet | None = None
        """Of the stream's threads: checks tensors, and takes none."""

    def loaded(self, model: LoadedModel | None) -> None:
        """There is another model (None: none); an update of the one before is dropped."""
        self._loaded, self._update, self._checks = model, None, None
        self._is_blank = False

    def draft_loaded(self, draft: LoadedModel | None) -> None:
        """What guesses is another one (None: nothing with weights); an update is dropped."""
        self._draft, self._update, self._checks = draft, None, None
        self.draft_is_from_outside = False

    def needs_model(self) -> bool:
        """True if :meth:`begin_blank` must come first."""
        return self._loaded is None

    def begin_blank(self, *slots: AdapterSlots) -> None:
        """Build a model that gets all its weights by an update.

        Raises:
            UnsupportedFeature: this worker's model cannot be built so.
        """
        if self._make_blank is None:
            raise no_updates()
        self.loaded(self._make_blank(*slots))
        self._is_blank = True

    @property
    def model(self) -> CausalLM:
        """The model, with or without weights."""
        assert self._loaded is not None
        return self._loaded.model

    @property
    def changes_model(self) -> bool:
        """True if the update holds tensors of the model itself, so that what it computes changes."""
        return self._update is not None and MODEL in self._update.targets

    @property
    def held(self) -> HeldWeights:
        """Tensors that have come of an update that is not over."""
        staged = 0 if self._update is None else self._update.num_tensors
        streamed = 0 if self._stream is None else self._stream.parts.num_tensors
        return HeldWeights(staged, streamed + len(self._received))

    @property
    def listens(self) -> bool:
        """True if a stream is open."""
        return self._stream is not None

    def stage(self, message: WeightsMessage, spread: Spread | None = None) -> int:
        """Take a part: the number of tensors that have come by now. If it raises, all that came before is
        there as it was, and parts of the stream wait on.

        Args:
            spread: takes the model's tensors on every rank; None: there is one.

        Raises:
            WeightsError, RequestError: it cannot be taken.
            UnsupportedFeature: the model cannot be updated.
            MemoryError: the system has no memory for it.
        """
        update = self._open_update()
        self._streamed = []
        keep = not (message.finish or message.prepare)  # else what waits is packed at once
        if message.source is not None:
            try:
                with memory_errors("update_weights"):
                    tensors = self._tensors(message, update)
                    if spread is None or message.target != MODEL:
                        update.take(message.target, tensors, keep=keep)
                    else:
                        spread(update, tensors, keep)
            except BaseException:
                self._give_back()
                raise
        return update.num_tensors

    def take_share(self, part: Sequence[tuple[str, Tensor]], keep: bool) -> Undo:
        """Take what rank 0 has of a part, on another rank: a call that has the update be what it was.

        Args:
            keep: see :meth:`UpdateSet.take`.

        Raises:
            WeightsError, MemoryError: it cannot be taken; nothing has changed.
        """
        update = self._open_update()
        undo = update.checkpoint()
        with memory_errors("update_weights"):
            update.take(MODEL, part, keep=keep)
        return undo

    def seal(self) -> None:
        """Check that the update is whole, and pack what waits. If it raises, nothing is lost.

        Raises:
            WeightsError: tensors are missing. RequestError: there is no update.
            MemoryError: the system has no memory for it.
        """
        if self._update is None or not self._update.num_tensors:
            raise RequestError(
                "update_weights: no tensors have come: nothing is to be put in", param="weights"
            )
        update = self._update
        if self._is_blank:
            update.begin(MODEL)
        try:
            with memory_errors("update_weights"):
                update.seal()
        except BaseException:
            self._keep_waiting(update)
            raise

    def apply(self) -> Undo:
        """Put the weights in; the update is over. Returns a call that takes them out again, after which it
        is as before. If it raises, it is not over."""
        update, before, was_blank = self._update, self.draft_is_from_outside, self._is_blank
        assert update is not None
        undo = update.apply()
        self._update, self._streamed = None, []
        self._is_blank = False
        if DRAFT in update.targets:
            self.draft_is_from_outside = True

        def undone() -> None:
            undo()
            self._update, self.draft_is_from_outside, self._is_blank = update, before, was_blank

        return undone

    def refuse(self) -> None:
        """Forget what the call brought that began the update: parts of the stream wait again."""
        self._update = None
        self._give_back()

    def drop(self) -> None:
        """Forget all that has come, on any way, and what is on its way by a broadcast."""
        self._unwanted.set()
        self._update, self._streamed, self._received = None, [], []
        if self._stream is not None:
            self._stream.parts.take()

    def join_group(self, address: Any, port: Any, rank: Any, world_size: Any) -> None:
        """Become a member of a trainer's group, in place of one before. Not in the worker's thread.

        Raises:
            RequestError: it cannot be joined.
        """
        check_member(address, port, rank, world_size)
        self._group = None
        left = self._left = threading.Event()
        group = WeightGroup.join(address, port, rank, world_size)
        if left.is_set():
            raise RequestError(
                "init_weight_update_group: close_weight_transfer came meanwhile: the group is not joined",
                param="method",
            )
        self._group = group

    def expect(self, message: WeightsMessage) -> None:
        """Check a part that is to be received by a broadcast.

        Raises:
            WeightsError, RequestError: it could not be taken.
        """
        if self._group is None:
            raise _missing("broadcast", "init_weight_update_group")
        self._checked(message, self._open_update())
        self._unwanted = threading.Event()

    def receive(self, message: WeightsMessage) -> None:
        """Receive what :meth:`expect` has checked, for :meth:`stage`. Not in the worker's thread.

        Raises:
            RequestError: it did not come, or is not wanted any more; the group is left.
            MemoryError: the system has no memory for it; the group is left.
        """
        group, unwanted = self._group, self._unwanted
        if group is None:
            raise _missing("broadcast", "init_weight_update_group")
        try:
            with memory_errors("update_weights: source = 'broadcast'"):
                received = list(group.receive(message.tensors, unwanted))
        except BaseException:  # what comes next would be taken for what did not
            self._group = None
            raise
        if not unwanted.is_set():
            self._received = received

    def open_stream(self) -> dict[str, Any]:
        """Listen for parts; in place of a stream before. Host, port and token for the client."""
        if self._stream is not None:
            self._stream.close()
        if self._loaded is None:
            raise no_updates()
        stream = self._stream = WeightStream(self, self._limits())
        return {"host": stream.host, "port": stream.port, "token": stream.token}

    def close_ways(self) -> None:
        """Leave the group and close the stream: what came and was not taken is forgotten. Idempotent."""
        self._left.set()
        self._unwanted.set()
        self._group, self._received = None, []
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def check_places(self, tensors: Sequence[TensorPlace]) -> None:
        """For the stream's threads, which may change nothing here."""
        checks, limits = self._checking(), self._limits()
        limits.check_count(len(tensors))
        for one in tensors:
            check_any(checks, one.name, one.shape, one.dtype)
        limits.check(tensors)

    def check_values(self, name: str, tensor: Tensor) -> None:
        """For the stream's threads, which may change nothing here."""
        self._checking().check_values(name, tensor)

    def _checking(self) -> UpdateSet:
        checks = self._checks
        if self._loaded is None:
            raise RequestError(
                "the engine has no model now, as it sleeps: wake_up(tags=['weights']) comes first",
                param="weights",
            )
        if checks is None:
            checks = self._checks = self._new_update()
        return checks

    def _limits(self) -> PartLimits:
        known = [one for one in (self._loaded, self._draft) if one is not None]
        return PartLimits(
            sum(one.max_tensors for one in known), sum(one.max_bytes for one in known)
        )

    def _open_update(self) -> UpdateSet:
        if self._update is None:
            self._update = self._new_update()
        return self._update

    def _new_update(self) -> UpdateSet:
        return UpdateSet(self._loaded, self._draft, within=self._within)

    def _keep_waiting(self, update: UpdateSet) -> None:
        """The update goes on after all: what waits is no longer the caller's, who may write over it."""
        try:
            update.keep_waiting()
        except BaseException:  # no memory
            self._update = None
            raise

    def _give_back(self) -> None:
        parts, self._streamed = self._streamed, []
        if self._stream is not None:
            self._stream.parts.give_back(parts)

    def _tensors(self, message: WeightsMessage, update: UpdateSet) -> Iterable[tuple[str, Tensor]]:
        if message.source == "process":
            self._limits().check_count(len(message.given))
            return [(checked_name(name), plain(name, tensor)) for name, tensor in message.given]
        if message.source == "stream":
            if self._stream is None:
                raise _missing("stream", "open_weight_stream")
            self._streamed = self._stream.parts.take()
            return [pair for part in self._streamed for pair in part]
        if message.source == "broadcast":
            received, self._received = self._received, []
            return received
        return read_shared(message.shared_memory, self._checked(message, update))

    def _checked(self, message: WeightsMessage, update: UpdateSet) -> tuple[TensorPlace, ...]:
        """The tensors that are to come; those that nobody wants are refused before memory is taken."""
        limits = self._limits()
        limits.check_count(len(message.tensors))
        for one in message.tensors:
            update.check(message.target, one.name, one.shape, one.dtype)
        limits.check(message.tensors)
        return message.tensors


def _missing(source: str, call: str) -> RequestError:
    return RequestError(f"update_weights: source = {source!r}: {call} comes first", param="source")
