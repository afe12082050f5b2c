"""Listening's steps (:mod:`headrace_core.listening.asks`), done by the synchronous engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from headrace_core.errors import GenerateError
from headrace_core.listening.asks import Align, Ask, Compute, Detokenize, Generate, Steps
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine

T = TypeVar("T")


class _Running(NamedTuple):
    """Steps that wait for the engine, and who is told what they end in."""

    steps: Steps[Any]
    done: Callable[[Any], None]


class OfflineSteps:
    """Takes many steps side by side: what they ask of the engine runs together.

    Alignments wait until nothing else runs, and then run as one batch. Leaving the ``with`` block ends
    whatever is left.
    """

    def __init__(self, engine: OfflineEngine) -> None:
        self._engine = engine
        self._call = engine.open_call()
        self._generating: dict[str, _Running] = {}
        self._aligning: list[tuple[Prompt, _Running]] = []

    @property
    def num_running(self) -> int:
        """How many have not ended."""
        return len(self._generating) + len(self._aligning)

    def start(self, steps: Steps[T], done: Callable[[T], None]) -> None:
        """Begin; ``done`` is called with what they end in.

        Raises: what a prompt of theirs is refused with.
        """
        self._go_on(_Running(steps, done), None)

    def advance(self) -> None:
        """Wait for the engine once, and go on with what has its answer.

        Raises:
            GenerateError: a request failed.
            EngineDead: the engine stopped.
        """
        if self._generating:
            for news in self._call.wait():
                if news.finished:
                    running = self._generating.pop(news.request_id)
                    self._go_on(running, _completion(news.output))
            return
        waiting, self._aligning = self._aligning, []
        aligned = self._engine.align([prompt for prompt, _ in waiting])
        for (_, running), weights in zip(waiting, aligned, strict=True):
            self._go_on(running, weights)

    def finish(self) -> None:
        """Go on until all have ended. Raises: as :meth:`advance`."""
        while self.num_running:
            self.advance()

    def result(self, steps: Steps[T]) -> T:
        """What steps end in; others go on meanwhile. Raises: as :meth:`start` and :meth:`advance`."""
        found: list[T] = []
        self.start(steps, found.append)
        while not found:
            self.advance()
        return found[0]

    def __enter__(self) -> OfflineSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._call.close()
        self._generating, self._aligning = {}, []

    def _go_on(self, running: _Running, answer: Any) -> None:
        """Answer, and answer on until the engine is needed."""
        while True:
            try:
                ask: Ask = running.steps.send(answer)
            except StopIteration as end:
                running.done(end.value)
                return
            match ask:
                case Generate(prompt, params):
                    request_id = uuid.uuid4().hex
                    self._engine.add_request(request_id, prompt, params, call=self._call)
                    self._generating[request_id] = running
                    return
                case Align(prompt):
                    self._aligning.append((prompt, running))
                    return
                case Compute(call):
                    answer = call()
                case Detokenize(token_ids):
                    tokenizer = self._engine.tokenizer
                    assert tokenizer is not None  # what transcribes has one
                    answer = tokenizer.decode(token_ids, skip_special_tokens=True)


def _completion(output: Any) -> CompletionOutput:
    assert isinstance(output, RequestOutput)
    part = output.outputs[0]
    if part.finish_reason in ("error", "abort"):
        raise GenerateError(
            f"request {output.request_id!r} ended with reason {part.finish_reason!r}; the log says why"
        )
    return part
