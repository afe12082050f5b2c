"""Rank 0's side of a model's passes: whatever runs the model here runs it on every rank.

A pass is a call of one of the model's methods that exchange tensors between the ranks. They are replaced
on the object, so that who calls them (steps, dummy steps, encoders, recordings) need not know of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from headrace_core.batch import ForwardBatch
from headrace_core.graph import StepGraph
from headrace_core.lora import AdapterSlots
from headrace_core.model import LaunchesPasses
from headrace_engine.lockstep.turns import TAKE_PART
from headrace_engine.multiproc.adapters import LedAdapters
from headrace_engine.multiproc.messages import ModelPass

ARRANGE = "arrange_experts"
"""Method of a model's divided experts, in which they move between ranks."""
OF_EXPERTS = (ARRANGE, TAKE_PART)
"""Those, and the one in which ranks compute for other engines only."""
PASSES = ("forward", "forward_streams", "embed_media", "encode", *OF_EXPERTS)
"""Methods of models whose layers are divided, and of their experts; another method is rank 0's own affair."""
REPLAY = "replay"
"""A pass that rank 0 replays: of a batch, and with so many rows of logits."""


class PassLeader:
    """Sends passes to the other ranks before rank 0 runs them. Used by the worker's thread.

    Args:
        send: sends a message to every other rank. Raises OSError.
        broken: is told what a pass raised: the ranks are no longer in step then. Returns what is to be
            raised instead.
        call: calls a method of the other ranks' workers, in any thread; results by rank from 1.
    """

    def __init__(
        self,
        send: Callable[[ModelPass], None],
        broken: Callable[[BaseException], BaseException],
        call: Callable[[str, Sequence[Any]], list[Future[Any]]],
    ) -> None:
        self._send = send
        self._broken = broken
        self._call = call
        self._is_running = False
        self._failure: BaseException | None = None
        """What the first pass raised that raised."""

    def lead(self, model: Any) -> None:
        """Have the passes of a model, or of its experts, run on every rank from now on."""
        for name in PASSES:
            own = getattr(model, name, None)
            if own is not None:
                setattr(model, name, partial(self._run, name, own))
        if isinstance(model, LaunchesPasses):
            setattr(model, "launch", partial(self._launch, model.launch))  # noqa: B010 - as above

    def lead_replays(self, graph: StepGraph | None) -> None:
        """Have what a graph replays run on every rank, from its own recording or eagerly."""
        if graph is not None:
            replay = cast(Any, graph).replay
            setattr(graph, "replay", partial(self._run, REPLAY, replay))  # noqa: B010 - as in lead

    def lead_adapters(self, slots: AdapterSlots) -> AdapterSlots:
        """Slots of rank 0's model that tell the other ranks what they are told."""
        return LedAdapters(slots, self._tell, self._call)

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
        begun, told = self._run("forward", own, batch), Future[Any]()

        def tell(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                told.set_result(done.result())
                return
            self._failure = self._failure or self._broken(error)
            told.set_exception(self._failure)

        begun.add_done_callback(tell)
        return told

    def _run(self, name: str, own: Callable[..., Any], *args: Any) -> Any:
        if self._is_running:  # a pass that is part of another one
            return own(*args)
        if self._failure is not None:  # a further pass would meet exchanges of the one that failed
            raise self._failure
        self._is_running = True
        try:
            self._send(ModelPass(name, tuple(_sent(arg) for arg in args)))
            return own(*args)
        except BaseException as error:
            self._failure = self._broken(error)
            if self._failure is error:
                raise
            raise self._failure from error
        finally:
            self._is_running = False


def _sent(arg: Any) -> Any:
    """An argument as other ranks get it: a batch without attention metadata, which each prepares itself."""
    if isinstance(arg, ForwardBatch):
        return dataclasses.replace(arg, attention=())
    if isinstance(arg, Sequence) and not isinstance(arg, str):
        return list(arg)
    return arg
