"""The calls of an engine that transcription needs, and how engines answer them."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from headrace_core.arrays import PackedArray
from headrace_core.engine import Generate
from headrace_core.errors import GenerateError
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams

T = TypeVar("T")


class EngineCalls(Protocol):
    """An engine, as far as transcription needs one."""

    async def generate(self, prompt: Prompt, params: SamplingParams) -> CompletionOutput:
        """The only completion of a request, when it has ended."""
        ...

    async def align(self, prompt: Prompt) -> PackedArray:
        """Alignment of a sequence; see :meth:`headrace_core.engine.EngineClient.align`."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """The result of work that takes longer than an event loop may be held."""
        ...


class SpeechEngine(Protocol):
    """An engine as far as the requests of clips need one (:class:`headrace_engine.front.EngineFront`)."""

    async def align(self, prompt: Prompt, request_id: str) -> PackedArray: ...

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str: ...


Complete = Callable[[Prompt, SamplingParams, str], Awaitable[RequestOutput]]
"""Runs a request: (prompt, parameters, request id) -> its last output."""


class ClipRequests:
    """The requests of one recording's clips: an :class:`EngineCalls` over an engine.

    Args:
        engine: aligns and detokenizes.
        complete: runs requests for text.
        request_id: all ids begin with it.
        compute: does work that no event loop should wait for.
    """

    def __init__(
        self,
        engine: SpeechEngine,
        complete: Complete,
        request_id: str,
        compute: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self._engine = engine
        self._complete = complete
        self._compute = compute
        self._request_id = request_id
        self._numbers = itertools.count()

    async def generate(self, prompt: Prompt, params: SamplingParams) -> CompletionOutput:
        output = await self._complete(prompt, params, self._next_id())
        completion = output.outputs[0]
        if completion.finish_reason in ("error", "abort"):
            raise GenerateError(
                f"request {output.request_id!r} ended with reason {completion.finish_reason!r}; the log "
                "says why"
            )
        return completion

    async def align(self, prompt: Prompt) -> PackedArray:
        return await self._engine.align(prompt, self._next_id())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._engine.detokenize(token_ids, skip_special_tokens=True)

    async def compute(self, work: Callable[[], T]) -> T:
        result: T = await self._compute(work)
        return result

    def _next_id(self) -> str:
        return f"{self._request_id}-{next(self._numbers)}"


class StreamedClipRequests(ClipRequests):
    """The requests of one recording's clips, whose outputs may be taken one by one.

    Args:
        generate: runs requests for text.
        engine, request_id, compute: as of :class:`ClipRequests`.
    """

    def __init__(
        self,
        engine: SpeechEngine,
        generate: Generate,
        request_id: str,
        compute: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        super().__init__(engine, self._last_output, request_id, compute)
        self._generate = generate

    def start(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[RequestOutput]:
        """The outputs of a request."""
        return self._generate(prompt, params, self._next_id())

    async def _last_output(
        self, prompt: Prompt, params: SamplingParams, request_id: str
    ) -> RequestOutput:
        outputs, last = self._generate(prompt, params, request_id), None
        try:
            async for output in outputs:
                last = output
        finally:
            await close(outputs)
        assert last is not None, "an engine yields at least one output"
        return last


async def close(outputs: AsyncIterator[Any]) -> None:
    """Abort a request whose outputs these are, if it still runs."""
    aclose = getattr(outputs, "aclose", None)
    if aclose is not None:
        await aclose()
