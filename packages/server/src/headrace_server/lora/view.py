"""A server's state and engine as the requests of one adapter see them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, cast

from headrace_core.engine import AdmissionTicket, Encode, EngineClient, Generate
from headrace_core.errors import UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.output import (
    BeamSearchOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
)
from headrace_core.pooling import PoolingParams
from headrace_core.pooling.scoring import ScoreInput
from headrace_core.request import Prompt
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_core.speech.model import AudioClip
from headrace_core.speech.transcription import Transcript, TranscriptionParams, TranscriptPiece
from headrace_server.observability.fingerprint import with_adapter
from headrace_server.state import ServerState


def state_with(state: ServerState, adapter: LoRARequest) -> ServerState:
    """The state by which a request is answered that names an adapter: its engine computes everything
    with it, and its model has the adapter's name."""
    seen = copy.copy(state)  # made anew, it would look the fingerprint up again
    seen.engine = cast(EngineClient, AdapterEngine(state.engine, adapter))
    seen.adapter = adapter
    seen.fingerprint = with_adapter(state.fingerprint, adapter.lora_path)
    return seen


class AdapterEngine:
    """An :class:`~headrace_core.engine.EngineClient` that runs all requests with one adapter.

    Args:
        engine: does the work.
        adapter: of all requests.
    """

    def __init__(self, engine: EngineClient, adapter: LoRARequest) -> None:
        self._engine = engine
        self._adapter = adapter
        name = adapter.lora_name
        self.model = dataclasses.replace(engine.model, name=name, names=(name,))

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        return self._engine.generate(
            prompt, params, request_id, lora_request=self._adapter, **options
        )

    async def beam_search(
        self, prompt: Prompt, params: BeamSearchParams, request_id: str, **options: Any
    ) -> BeamSearchOutput:
        return await self._engine.beam_search(
            prompt, params, request_id, lora_request=self._adapter, **options
        )

    async def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        task: str,
        priority: int = 0,
        add_special_tokens: bool | None = None,
        entry: AdmissionTicket | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        return await self._engine.encode(
            prompt,
            params,
            request_id,
            task=task,
            priority=priority,
            lora_request=self._adapter,
            add_special_tokens=add_special_tokens,
            entry=entry,
        )

    async def score(
        self,
        data_1: Sequence[ScoreInput],
        data_2: Sequence[ScoreInput],
        params: PoolingParams,
        request_id: str,
        **options: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        return await self._engine.score(
            data_1, data_2, params, request_id, lora_request=self._adapter, **options
        )

    async def answer_plugin(
        self,
        prompt: Any,
        params: PoolingParams | None,
        request_id: str,
        *,
        encode: Encode | None = None,
        **options: Any,
    ) -> Any:
        return await self._engine.answer_plugin(
            prompt, params, request_id, encode=encode or self.encode, **options
        )

    async def transcribe(
        self,
        audio: AudioClip,
        params: TranscriptionParams,
        request_id: str,
        *,
        generate: Generate | None = None,
    ) -> Transcript:
        _refuse_words(params)
        return await self._engine.transcribe(
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
        _refuse_words(params)
        return self._engine.stream_transcript(
            audio, params, request_id, generate=generate or self.generate
        )

    async def align(self, prompt: Prompt, request_id: str, **options: Any) -> Any:
        raise _no_alignment()

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._engine.settings

    def __getattr__(self, name: str) -> Any:
        # What has nothing to do with adapters: tokens, health, statistics, ...
        return getattr(self._engine, name)


def _refuse_words(params: TranscriptionParams) -> None:
    """Words' times come of an alignment, which the engine computes without adapters."""
    if params.words:
        raise _no_alignment()


def _no_alignment() -> UnsupportedFeature:
    return UnsupportedFeature(
        "timestamp_granularities[] = 'word': not with an adapter: texts are aligned by the base model "
        "alone; must be segment",
        param="timestamp_granularities[]",
    )
