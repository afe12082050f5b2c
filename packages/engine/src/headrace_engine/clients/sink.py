"""Between a core's thread and the engine that hears of it: outputs, and the news of a death."""

from __future__ import annotations

import weakref

from headrace_core.errors import EngineDead
from headrace_engine.clients.base import OutputSink
from headrace_engine.messages import CoreOutputs


class WeakSink:
    """Passes a core's outputs on as long as somebody holds the engine: the core's thread must not
    keep an engine alive that everybody else has forgotten."""

    def __init__(self, sink: OutputSink) -> None:
        self._sink = weakref.ref(sink)

    def on_outputs(self, outputs: CoreOutputs) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_outputs(outputs)

    def on_death(self, error: BaseException) -> None:
        sink = self._sink()
        if sink is not None:
            sink.on_death(error)


def dead_again(error: BaseException) -> EngineDead:
    """A new exception for each consumer: one object's traceback must not be shared."""
    dead = EngineDead(str(error))
    dead.__cause__ = error
    return dead
