"""Requests taken in without keeping the event loop waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from headrace_core.errors import EngineDead, QueueFull
from headrace_core.request import ChatPrompt, brings_media
from headrace_core.sampling.params import SamplingParams
from headrace_engine.input_processing.abandonment import read_until
from headrace_engine.input_processing.control_tokens import RenderedPrompt
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.input_processing.pooling import FilledPrompt, PairPrompt, PoolingPrompt
from headrace_engine.input_processing.prompts import PairParts
from headrace_engine.structured.admission import Admitted

SMALL_PROMPT = 2048
"""Characters up to which a prompt is tokenised on the event loop: well under a millisecond."""
MAX_COMPILING = 256
"""Requests whose constraints may wait to be compiled; more are refused."""
INPUT_THREADS = 2
"""Threads for larger prompts. The tokenizer releases the interpreter's lock."""

MEDIA_THREADS = 64
"""Threads for prompts with media, which wait for other machines and processes."""

Result = TypeVar("Result")


class InputThreads:
    """Small work is done on the event loop at once, all other in threads. One event loop only.

    Args:
        input_processor: does the work.
        compile_processes: constraints that compile at once.
    """

    def __init__(self, input_processor: InputProcessor, compile_processes: int) -> None:
        self._input_processor = input_processor
        self._pool = ThreadPoolExecutor(INPUT_THREADS, thread_name_prefix="headrace-input")
        self._media_pool = ThreadPoolExecutor(MEDIA_THREADS, thread_name_prefix="headrace-media")
        self._grammar_pool = ThreadPoolExecutor(
            compile_processes, thread_name_prefix="headrace-admission"
        )
        self._closed = False
        self.num_compiling = 0
        """Requests whose constraints compile, or wait for that."""

    async def run(
        self, prompt: PoolingPrompt | Sequence[int], work: Callable[[], Result]
    ) -> Result:
        """The result of ``work``, which looks at the whole of ``prompt``. Where that brings media, no
        prompt without waits for it; if the caller is cancelled, its media are not read to the end.

        Raises:
            EngineDead: closed before its turn came.
        """
        if isinstance(prompt, PairParts) or (
            not isinstance(prompt, PairPrompt | FilledPrompt | RenderedPrompt)
            and brings_media(prompt)
        ):
            return await self._reading_media(work)
        return await self.run_sized(_size(prompt), work)

    async def _reading_media(self, work: Callable[[], Result]) -> Result:
        abandoned: Future[None] = Future()

        def read() -> Result:
            with read_until(abandoned):
                return work()

        try:
            return await self._in(self._media_pool, read)
        except BaseException:
            abandoned.set_result(None)
            raise

    async def run_sized(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of ``work``, which looks at so many characters or tokens.

        Raises:
            EngineDead: closed before its turn came.
        """
        if size <= SMALL_PROMPT:
            return work()
        return await self._in(self._pool, work)

    async def run_heavy(self, work: Callable[[], Result]) -> Result:
        """The result of ``work`` that no event loop should wait for.

        Raises:
            EngineDead: closed before its turn came.
        """
        return await self._in(self._pool, work)

    async def admit(self, params: SamplingParams) -> Admitted | None:
        """Let a constraint compile, in threads that nothing else waits for: nor do requests whose
        constraints are known, or refused at first sight.

        Raises:
            QueueFull: :data:`MAX_COMPILING` others are at it.
            RequestError: no backend can serve the constraint.
        """
        known = await self._in(self._pool, lambda: self._input_processor.known(params))
        if known is not None:
            return known
        if self.num_compiling >= MAX_COMPILING:
            raise QueueFull(
                f"{self.num_compiling} constraints wait already to be compiled", retry_after=1.0
            )
        self.num_compiling += 1
        try:
            return await self._in(self._grammar_pool, lambda: self._input_processor.admit(params))
        finally:
            self.num_compiling -= 1

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise EngineDead("the engine is shut down")
        future = pool.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Dropped by close(): nobody has cancelled the task that waits, so it must be told.
            raise EngineDead("the engine is shut down") from None

    def close(self) -> None:
        """Drop what waits, which raises EngineDead there; what runs is not waited for."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)


def size_of_texts(texts: Sequence[object]) -> int:
    """Roughly how many characters texts to be scored have; forms are checked elsewhere."""
    return sum(map(_size_of_input, texts))


def _size_of_input(text: object) -> int:
    if isinstance(text, Mapping):
        return sum(map(_size_of_input, text.values()))
    return len(text) if isinstance(text, Sized) else SMALL_PROMPT + 1


def _size(prompt: PoolingPrompt | Sequence[int]) -> int:
    """Roughly how many characters or tokens an input processor must look at; forms are checked there."""
    if isinstance(prompt, PairPrompt):
        return len(prompt.first) + len(prompt.second)
    if isinstance(prompt, RenderedPrompt):
        return len(prompt.text)
    if isinstance(prompt, FilledPrompt):
        return len(prompt.token_ids)
    if isinstance(prompt, ChatPrompt):
        # A template of the request's own runs in another process, and large inputs take a while.
        if prompt.chat_template is not None or prompt.tools or prompt.documents:
            return SMALL_PROMPT + 1
        return sum(map(_size_of_message, prompt.messages))
    given: object = prompt
    if isinstance(prompt, Mapping):
        if prompt.get("prompt_embeds") is not None:
            return SMALL_PROMPT + 1  # decoded in another process
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, Sized) else 0


def _size_of_message(message: object) -> int:
    if not isinstance(message, Mapping):
        return 16
    if message.get("tool_calls"):
        return SMALL_PROMPT + 1  # arguments of any length, nested as the client likes
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return 16 + sum(len(text) for text in texts if isinstance(text, str))
