"""Rank 0's side of a model's passes: whatever runs the model here runs it on every rank.

A pass is a call of one of the model's methods that exchange tensors between the ranks. They are replaced
on the object, so that who calls them (steps, dummy steps, encoders, recordings) need not know of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from headrace_core.batch import ForwardBatch
from headrace_core.graph import StepGraph
from headrace_core.lora import AdapterSlots
from headrace_core.model import DividesVocabulary, LaunchesPasses
from headrace_engine.lockstep.turns import TAKE_LEAVE, TAKE_PART
from headrace_engine.multiproc.adapters import LedAdapters
from headrace_engine.multiproc.messages import ModelPass

if TYPE_CHECKING:
    from torch import Tensor

ARRANGE = "arrange_experts"
"""Method of a model's divided experts, in which they move between ranks."""
BEGIN_MOVE, END_MOVE = "begin_move", "end_move"
"""Likewise, in which they begin to come to other ranks, and take their places there."""
BALANCE = "balance_experts"
"""Likewise, after a step: in which each stage moves its own, if it is time to."""
OF_EXPERTS = (ARRANGE, BEGIN_MOVE, END_MOVE, BALANCE, TAKE_PART, TAKE_LEAVE)
"""Those, and the ones in which ranks compute for other engines only."""
OF_LAYERS = ("forward", "forward_streams")
"""Those of models that run their layers: every stage has a part in them."""
PASSES = (*OF_LAYERS, "embed_media", "encode", *OF_EXPERTS)
"""Methods of models whose layers are divided, and of their experts; another method is rank 0's own affair."""
LOGITS = "compute_logits"
VOCABULARY = ("token_vectors", LOGITS)
"""Further ones of models whose vocabulary is divided."""
LOGITS_OF_ROWS = "compute_logits_of_rows"
"""The pass ``compute_logits`` of rows (the first, and how many) of what the last pass ``forward`` returned,
which every rank has."""
REPLAY = "replay"
"""A pass that rank 0 replays: of a batch, with so many rows of logits (None: it ends with hidden states)."""


class PassLeader:
    """Sends passes to the other ranks before rank 0 runs them. Used by the worker's thread.

    Args:
        send: sends a message to every other rank. Raises OSError.
        broken: is told what a pass raised: the ranks are no longer in step then. Returns what is to be
            raised instead.
        call: calls a method of the other ranks' workers, in any thread; results by rank from 1.
        expect: tells the other ranks that a pass is about to come.
    """

    def __init__(
        self,
        send: Callable[[ModelPass], None],
        broken: Callable[[BaseException], BaseException],
        call: Callable[[str, Sequence[Any]], list[Future[Any]]],
        expect: Callable[[], None] = lambda: None,
    ) -> None:
        self._send = send
        self._expect = expect
        self._broken = broken
        self._call = call
        self._is_running = False
        self._failure: BaseException | None = None
        """What the first pass raised that raised."""
        self._states: Tensor | None = None
        """What the last pass ``forward`` returned, if every rank has it."""

    def lead(self, model: Any) -> None:
        """Have the passes of a model, or of its experts, run on every rank from now on."""
        divided = model.vocabulary_passes if isinstance(model, DividesVocabulary) else ()
        ways: dict[str, Callable[..., Any]] = {}
        if LOGITS in divided:
            ways = {LOGITS: self._run_logits}
            if not isinstance(model, LaunchesPasses):  # whose result rank 0 alone gets
                ways["forward"] = self._run_forward
        for name in (*PASSES, *divided):
            own = getattr(model, name, None)
            if own is not None:
                setattr(model, name, partial(ways.get(name, partial(self._run, name)), own))
        if isinstance(model, LaunchesPasses):
            setattr(model, "launch", partial(self._launch, model.launch))  # noqa: B010 - as above
            expect = model.expect
            setattr(model, "expect", lambda num_rows: self._watched(expect(num_rows)))  # noqa: B010

    def expect(self) -> None:
        """A pass is about to come: other ranks may wake up while this one makes it ready."""
        if self._failure is None:
            self._expect()

    def lead_replays(self, graph: StepGraph | None) -> None:
        """Have what a graph replays run on every rank, from its own recording or eagerly."""
        if graph is not None:
            replay = cast(Any, graph).replay
            setattr(graph, "replay", partial(self._run, REPLAY, replay))  # noqa: B010 - as in lead

    def lead_adapters(self, slots: AdapterSlots) -> AdapterSlots:
        """Slots of rank 0's model that tell the other ranks what they are told."""
        return LedAdapters(slots, self._tell, self._call)

    def call(self, method: str, args: Sequence[Any]) -> list[Future[Any]]:
        """Call a method of the other ranks' workers, which they run after the passes until now; results by
        rank from 1."""
        return self._call(method, args)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While this lasts, passes are rank 0's only: they are recorded, and exchange nothing."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def _tell(self, name: str, *args: Any) -> None:
        """Have the other ranks do what this rank has done between two passes."""
        if self._is_running:
            return
        if self._failure is not None:
            raise self._failure
        try:
            self._send(ModelPass(name, args))
        except BaseException as error:
            self._failure = self._broken(error)
            raise self._failure from error

    def _launch(
        self, own: Callable[[ForwardBatch], Future[Any]], batch: ForwardBatch
    ) -> Future[Any]:
        """Begin a pass, which may fail at any time until its result comes."""
        return self._watched(self._run("forward", own, batch))

    def _watched(self, begun: Future[Any]) -> Future[Any]:
        """The result of a pass; if it fails, no further one runs."""
        told = Future[Any]()

        def tell(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                told.set_result(done.result())
                return
            self._failure = self._failure or self._broken(error)
            told.set_exception(self._failure)

        begun.add_done_callback(tell)
        return told

    def _run_forward(self, own: Callable[[ForwardBatch], Tensor], batch: ForwardBatch) -> Tensor:
        """Run a pass whose hidden states logits may be made of."""
        if self._is_running:
            return own(batch)
        self._states = None
        states: Tensor = self._run("forward", own, batch)
        self._states = states
        return states

    def _run_logits(self, own: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Make logits of hidden states: of rows that every rank has, or of others, which are sent."""
        start = None if self._states is None else _first_row(hidden, self._states)
        sent = None if start is None else (LOGITS_OF_ROWS, (start, hidden.shape[0]))
        logits: Tensor = self._run(LOGITS, own, hidden, sent=sent)
        return logits

    def _run(
        self,
        name: str,
        own: Callable[..., Any],
        *args: Any,
        sent: tuple[str, tuple[Any, ...]] | None = None,
    ) -> Any:
        """Run a pass on every rank.

        Args:
            sent: what the others run in its place; None: the same.
        """
        if self._is_running:  # a pass that is part of another one
            return own(*args)
        if self._failure is not None:  # a further pass would meet exchanges of the one that failed
            raise self._failure
        self._is_running = True
        try:
            self._send(ModelPass(*(sent or (name, args))))
            return own(*args)
        except BaseException as error:
            self._failure = self._broken(error)
            if self._failure is error:
                raise
            raise self._failure from error
        finally:
            self._is_running = False


def _first_row(hidden: Tensor, states: Tensor) -> int | None:
    """The row of states [R, H] at which hidden [S, H] begins, where that is S of its rows, in order; None: it
    is other memory."""
    same = hidden.untyped_storage().data_ptr() == states.untyped_storage().data_ptr()
    if not same or hidden.stride() != states.stride() or hidden.shape[1:] != states.shape[1:]:
        return None
    distance = int(hidden.storage_offset()) - int(states.storage_offset())
    row, column = divmod(distance, states.stride(0))
    is_within = column == 0 and 0 <= row <= states.shape[0] - hidden.shape[0]
    return row if is_within else None
