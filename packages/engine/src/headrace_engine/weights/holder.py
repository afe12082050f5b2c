"""The worker's side of an update: what has come of it, and the ways it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from headrace_core.errors import RequestError
from headrace_core.lora import AdapterSlots
from headrace_core.model import CausalLM
from headrace_engine.weights.broadcast import WeightGroup, check_member
from headrace_engine.weights.messages import DRAFT, MODEL, TensorPlace, WeightsMessage
from headrace_engine.weights.shared_memory import read_shared
from headrace_engine.weights.stream import WeightStream
from headrace_engine.weights.update_set import (
    LoadedModel,
    Undo,
    UpdateSet,
    check_any,
    no_updates,
)


class WeightHolder:
    """Belongs to a worker, and to its thread.

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
        self.draft_is_from_outside = False
        """What guesses has weights that are not those of its checkpoint."""
        self._is_blank = False
        """The model has no weights yet."""
        self._checks: UpdateSet | None = None
        """Of the stream's thread: checks tensors, and takes none."""

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

    def stage(self, message: WeightsMessage) -> int:
        """Take a part: the number of tensors that have come by now.

        Raises:
            WeightsError, RequestError: it cannot be taken; the model is as it was.
            UnsupportedFeature: the model cannot be updated.
        """
        if self._update is None:
            self._update = self._new_update()
        update = self._update
        if message.source is not None:
            try:
                tensors = self._tensors(message, update)
                update.take(message.target, tensors, keep=not message.finish)
            finally:
                if update.failed:
                    self._update = None
        return update.num_tensors

    def seal(self) -> None:
        """Check that the update is whole.

        Raises:
            WeightsError: tensors are missing. RequestError: there is no update.
        """
        if self._update is None or not self._update.num_tensors:
            raise RequestError(
                "update_weights: no tensors have come: nothing is to be put in", param="weights"
            )
        update = self._update
        if self._is_blank:
            update.begin(MODEL)
        try:
            update.seal()
        finally:
            if update.failed:
                self._update = None

    def apply(self) -> Undo:
        """Put the weights in; the update is over. Returns a call that takes them out again."""
        update, self._update = self._update, None
        assert update is not None
        undo = update.apply()
        self._is_blank = False
        if DRAFT in update.targets:
            self.draft_is_from_outside = True
        return undo

    def drop(self) -> None:
        """Forget what has come."""
        self._update = None

    def join_group(self, address: Any, port: Any, rank: Any, world_size: Any) -> None:
        """Become a member of a trainer's group, in place of one before.

        Raises:
            RequestError: it cannot be joined.
        """
        check_member(address, port, rank, world_size)
        self._group = None
        self._group = WeightGroup.join(address, port, rank, world_size)

    def open_stream(self) -> dict[str, Any]:
        """Listen for parts; in place of a stream before. Host, port and token for the client."""
        if self._stream is not None:
            self._stream.close()
        if self._loaded is None:
            raise RequestError("open_weight_stream: the engine has no model now", param="method")
        whole = sum(one.max_bytes for one in (self._loaded, self._draft) if one is not None)
        self._stream = WeightStream(self._check, whole)
        return {
            "host": self._stream.host,
            "port": self._stream.port,
            "token": self._stream.token,
        }

    def close_ways(self) -> None:
        """Leave the group and close the stream. Idempotent."""
        self._group = None
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _new_update(self) -> UpdateSet:
        return UpdateSet(self._loaded, self._draft, within=self._within)

    def _check(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """For the stream's thread, which may change nothing here."""
        if self._loaded is None:
            raise RequestError("the engine has no model now", param="weights")
        if self._checks is None:
            self._checks = self._new_update()
        check_any(self._checks, name, shape, dtype)

    def _tensors(self, message: WeightsMessage, update: UpdateSet) -> Iterable[tuple[str, Tensor]]:
        if message.source == "process":
            return message.given
        if message.source == "stream":
            if self._stream is None:
                raise _missing("stream", "open_weight_stream")
            return self._stream.take()
        if message.source == "broadcast":
            if self._group is None:
                raise _missing("broadcast", "init_weight_update_group")
            return self._group.receive(self._checked(message, update))
        return read_shared(message.shared_memory, self._checked(message, update))

    def _checked(self, message: WeightsMessage, update: UpdateSet) -> tuple[TensorPlace, ...]:
        """The tensors that are to come; those that nobody wants are refused before memory is taken."""
        for one in message.tensors:
            update.check(message.target, one.name, one.shape, one.dtype)
        return message.tensors


def _missing(source: str, call: str) -> RequestError:
    return RequestError(f"update_weights: source = {source!r}: {call} comes first", param="source")
