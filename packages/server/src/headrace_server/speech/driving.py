"""Listening's steps, done by an asynchronous engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from typing import Any, TypeVar

from headrace_core.engine import EngineClient
from headrace_core.listening.asks import Align, Ask, Compute, Detokenize, Generate, Steps
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams
from headrace_server.offload import OffLoop
from headrace_server.stream import close

HEAVY = 1 << 16
"""Cost of what takes too long for the event loop: looking through long audio, aligning."""

T = TypeVar("T")
Run = Callable[[Prompt, SamplingParams], AsyncIterator[RequestOutput]]
"""Gives a prompt to the engine, under an id of its own."""


async def drive(steps: Steps[T], answer: Callable[[Ask], Awaitable[Any]]) -> T:
    """What steps end in. The first answer that fails ends them; so does cancelling."""
    reply: Any = None
    with closing(steps):
        while True:
            try:
                ask = steps.send(reply)
            except StopIteration as end:
                result: T = end.value
                return result
            reply = await answer(ask)


class Answers:
    """Answers asks.

    Args:
        engine: the server's.
        off_loop: for what takes long.
        run: starts a request.
        engine_id: gives an id for each other request.
    """

    def __init__(
        self, engine: EngineClient, off_loop: OffLoop, run: Run, engine_id: Callable[[], str]
    ) -> None:
        self._engine = engine
        self._off_loop = off_loop
        self._run = run
        self._engine_id = engine_id

    async def __call__(self, ask: Ask) -> Any:
        match ask:
            case Generate(prompt, params):
                return await self._completion(prompt, params)
            case Align(prompt):
                return await self._engine.align(prompt, self._engine_id())
            case Detokenize(token_ids):
                return await self._engine.detokenize(token_ids, skip_special_tokens=True)
            case Compute(call):
                return await self._off_loop(HEAVY, call)

    async def _completion(self, prompt: Prompt, params: SamplingParams) -> CompletionOutput:
        outputs, last = self._run(prompt, params), None
        try:
            async for output in outputs:
                last = output
        finally:
            await close(outputs)
        assert last is not None, "an engine yields at least one output"
        return last.outputs[0]
