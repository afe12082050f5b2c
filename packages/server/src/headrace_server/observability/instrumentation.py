"""An engine client with watchers: what every request goes through, whichever route it came by.

Logs of outputs, traces and the scope of cached prefixes hang here, at the one place that all routes
pass, instead of in each of them. A server without watchers uses the engine itself.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from headrace_core.engine import (
    AdmissionTicket,
    Encode,
    EngineClient,
    EngineStats,
    Generate,
    OutputStream,
    TokenizedPrompt,
)
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    BeamSearchOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.io_processor import IOProcessor
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import AudioClip, SpeechModel
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_server.requests.beam_output import as_request_output

logger = logging.getLogger(__name__)


class RequestWatch(Protocol):
    """Watches one request. What it raises is logged and goes no further."""

    def saw(self, output: RequestOutput) -> None:
        """An output, before it is passed on."""
        ...

    def ended(self, error: BaseException | None) -> None:
        """Once: after the last output, an error, or when nobody wants more."""
        ...


class PoolingWatch(Protocol):
    """Watches one pooling request, or the pairs of one call. What it raises is logged."""

    def ended(
        self, outputs: Sequence[PoolingRequestOutput[Any]], error: BaseException | None
    ) -> None:
        """Once: with the results, of which there are none after an error."""
        ...


class Watcher(Protocol):
    """Watches all requests."""

    every_output: bool
    """True if it must see each output of a stream, which costs an object each; else only those with
    more than text in them, the last one included."""

    def begin(self, prompt: Prompt, params: SamplingParams, request_id: str) -> RequestWatch:
        """A request goes to the engine; called in its context. A beam search is one request, whose
        ``params`` have as many completions as the search has beams."""
        ...

    def begin_pooling(self, task: str, request_id: str) -> PoolingWatch:
        """The same of a pooling request; ``task`` is ``score`` for pairs."""
        ...


class InstrumentedEngine:
    """An :class:`~headrace_core.engine.EngineClient` in front of another.

    Args:
        engine: does the work.
        watchers: see every request.
        rewrite: changes a prompt on its way.
    """

    def __init__(
        self,
        engine: EngineClient,
        watchers: Sequence[Watcher] = (),
        rewrite: Callable[[Prompt], Prompt] = lambda prompt: prompt,
    ) -> None:
        self.engine = engine
        self._watchers = tuple(watchers)
        self._every_output = any(watcher.every_output for watcher in watchers)
        self._rewrite = rewrite

    @property
    def model(self) -> ServedModel:
        return self.engine.model

    @property
    def dead_error(self) -> BaseException | None:
        return self.engine.dead_error

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.engine.settings

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
    ) -> AsyncIterator[RequestOutput]:
        outputs = self.engine.generate(
            self._rewrite(prompt),
            params,
            request_id,
            priority=priority,
            lora_request=lora_request,
            add_special_tokens=add_special_tokens,
        )
        if not self._watchers:
            return outputs
        watches = [watcher.begin(prompt, params, request_id) for watcher in self._watchers]
        if isinstance(outputs, OutputStream):
            return _WatchedStream(outputs, watches, self._every_output)
        return _WatchedOutputs(outputs, watches)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
    ) -> BeamSearchOutput:
        found = BeamSearchOutput([])

        async def search() -> AsyncIterator[RequestOutput]:
            nonlocal found
            found = await self.engine.beam_search(
                self._rewrite(prompt),
                params,
                request_id,
                priority=priority,
                lora_request=lora_request,
                add_special_tokens=add_special_tokens,
            )
            yield as_request_output(found, request_id)

        shown = SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        shown.n = params.beam_width  # sampling refuses several completions at temperature 0
        watches = [watcher.begin(prompt, shown, request_id) for watcher in self._watchers]
        async for _ in _WatchedOutputs(search(), watches):
            pass
        return found

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool | None = None,
        entry: AdmissionTicket | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        work = self.engine.encode(
            self._rewrite(prompt),
            params,
            request_id,
            task=task,
            priority=priority,
            lora_request=lora_request,
            add_special_tokens=add_special_tokens,
            entry=entry,
        )
        watched = _WatchedPooling(self._watchers, task, request_id)
        with watched:
            output = await work
            watched.outputs = (output,)
        return output

    async def answer_plugin(
        self,
        prompt: Any,
        params: PoolingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        encode: Encode | None = None,
    ) -> Any:
        return await self.engine.answer_plugin(
            prompt,
            params,
            request_id,
            priority=priority,
            add_special_tokens=add_special_tokens,
            encode=encode or self.encode,
        )

    async def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        work = self.engine.score(
            self._rewritten(data_1),
            self._rewritten(data_2),
            params,
            request_id,
            priority=priority,
            lora_request=lora_request,
            chat_template=chat_template,
        )
        watched = _WatchedPooling(self._watchers, "score", request_id)
        with watched:
            outputs = await work
            watched.outputs = outputs
        return outputs

    def _rewritten(self, sides: Sequence[ScoreInput]) -> Sequence[ScoreInput]:
        return [cast(ScoreInput, self._rewrite(cast(Prompt, side))) for side in sides]

    async def transcribe(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> Transcript:
        return await self.engine.transcribe(
            audio, params, request_id, generate=generate or self.generate
        )

    def stream_transcript(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> AsyncIterator[TranscriptPiece]:
        return self.engine.stream_transcript(
            audio, params, request_id, generate=generate or self.generate
        )

    @property
    def speech(self) -> SpeechModel | None:
        return self.engine.speech

    @property
    def io_processor(self) -> IOProcessor | None:
        return self.engine.io_processor

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.engine.abort(request_ids)

    async def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool | None = None, strings: bool = False
    ) -> TokenizedPrompt:
        return await self.engine.tokenize(
            prompt, add_special_tokens=add_special_tokens, strings=strings
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        return await self.engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def stats(self, *, drain: bool = False) -> EngineStats:
        return await self.engine.stats(drain=drain)

    async def check_health(self) -> None:
        await self.engine.check_health()

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self.engine.add_lora(lora_request)

    async def remove_lora(self, lora_int_id: int) -> bool:
        return await self.engine.remove_lora(lora_int_id)

    async def list_loras(self) -> Sequence[LoRARequest]:
        return await self.engine.list_loras()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return await self.engine.reset_prefix_cache(reset_running_requests)

    async def pause_generation(
        self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        await self.engine.pause_generation(
            wait_for_inflight_requests=wait_for_inflight_requests, clear_cache=clear_cache
        )

    async def resume_generation(self) -> None:
        await self.engine.resume_generation()

    async def is_paused(self) -> bool:
        return await self.engine.is_paused()

    async def start_profile(self) -> None:
        await self.engine.start_profile()

    async def stop_profile(self) -> None:
        await self.engine.stop_profile()

    async def collective_rpc(
        self, method: str, *, args: Sequence[Any] = (), timeout: float | None = None
    ) -> list[Any]:
        return await self.engine.collective_rpc(method, args=args, timeout=timeout)

    async def scale_elastic_ep(self, new_size: int, drain_timeout: float = 300.0) -> int:
        return await self.engine.scale_elastic_ep(new_size, drain_timeout)

    async def shutdown(self, drain_timeout: float = 0.0) -> None:
        await self.engine.shutdown(drain_timeout)

    def __getattr__(self, name: str) -> Any:
        # What a later version of the contract adds, and what an engine has beyond it.
        return getattr(self.engine, name)


class _WatchedPooling:
    """The block in which a pooling call is awaited; it leaves the results in ``outputs``."""

    def __init__(self, watchers: Sequence[Watcher], task: str, request_id: str) -> None:
        self.outputs: Sequence[PoolingRequestOutput[Any]] = ()
        self._watches = [watcher.begin_pooling(task, request_id) for watcher in watchers]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for watch in self._watches:
            try:
                watch.ended(self.outputs, error)
            except Exception:
                logger.exception("a watcher failed at the end of a request")


class _WatchedOutputs(AsyncIterator[RequestOutput]):
    """Outputs that are pulled."""

    def __init__(self, outputs: AsyncIterator[RequestOutput], watches: list[RequestWatch]) -> None:
        self._outputs = outputs
        self._watches: list[RequestWatch] = watches

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._outputs.__anext__()
        except StopAsyncIteration:
            self._end(None)
            raise
        except BaseException as error:
            self._end(error)
            raise
        self._see(output)
        return output

    async def aclose(self) -> None:
        """Abort the request, if it still runs."""
        aclose = getattr(self._outputs, "aclose", None)
        try:
            if aclose is not None:
                await aclose()
        finally:
            self._end(None)

    def _see(self, output: RequestOutput) -> None:
        for watch in self._watches:
            try:
                watch.saw(output)
            except Exception:
                logger.exception("a watcher failed on an output; the request goes on")
        if output.finished:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            try:
                watch.ended(error)
            except Exception:
                logger.exception("a watcher failed at the end of a request")


class _WatchedStream(_WatchedOutputs):
    """Outputs that are pushed, too."""

    def __init__(
        self, outputs: OutputStream, watches: list[RequestWatch], every_output: bool
    ) -> None:
        super().__init__(outputs.__aiter__(), watches)
        self._stream = outputs
        self._every_output = every_output

    async def decided(self) -> None:
        """See :meth:`headrace_core.engine.OutputStream.decided`."""
        await self._stream.decided()

    async def push(
        self,
        take: Callable[[RequestOutput], bool],
        take_text: Callable[[str, int], bool] | None = None,
    ) -> None:
        """See :meth:`headrace_core.engine.OutputStream.push`."""

        def see(output: RequestOutput) -> bool:
            self._see(output)
            return take(output)

        try:
            await self._stream.push(see, None if self._every_output else take_text)
        except BaseException as error:
            self._end(error)
            raise
