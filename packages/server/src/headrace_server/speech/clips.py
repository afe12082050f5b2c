"""One clip at a time: attempts until one looks right, by the rules of Whisper's authors.

Radford et al. 2022, arXiv:2212.04356, section 4.5: greedy first, then with rising temperatures where the
text repeats itself or its tokens are improbable. Previous text is not carried from clip to clip, so
clips run side by side.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from headrace_core.engine import EngineClient
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import Prompt
from headrace_core.sampling import SamplingParams
from headrace_core.speech import AudioClip, SpeechModel, SpeechTask
from headrace_server.stream import close

AT_ONCE = 16
"""Clips of one request that the engine has at a time."""
HEAVY = 1 << 16
"""Cost of looking through long audio, or of aligning; more than is done on the event loop."""
LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried where the client asks for none."""
LEAST_LOGPROB = -1.0
"""A mean log-probability below it looks wrong."""
MOST_COMPRESSION = 2.4
"""A text that compresses better repeats itself."""
SILENCE = 0.6
"""Where nobody speaking is likelier, improbable text is none."""

Run = Callable[[Prompt, SamplingParams], AsyncIterator[RequestOutput]]
"""Gives a prompt to the engine, under an id of its own."""


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip and its place in the audio."""

    audio: AudioClip
    index: int
    start: float
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Heard:
    """What became of a clip."""

    clip: Clip
    text: str
    token_ids: Sequence[int]
    """End tokens left out."""
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float | None
    """None: the model does not say, or it was not asked."""


@dataclass(frozen=True)
class Task:
    """What is wanted of all clips of a request."""

    task: SpeechTask
    language: str | None
    to_language: str | None
    prompt: str
    """The client's."""
    timestamps: bool
    tell_silence: bool
    """Whether each clip is asked if anybody speaks."""

    @property
    def written(self) -> str | None:
        """The language of the text; None: unknown, as a translation says only what it is not in."""
        return self.to_language or (self.language if self.task == "transcribe" else None)


class Listener:
    """Hears clips.

    Args:
        engine: with a speech model.
        run: gives requests to it.
        params: sampling parameters at a temperature.
        temperatures: tried in this order.
    """

    def __init__(
        self,
        engine: EngineClient,
        run: Run,
        params: Callable[[float], SamplingParams],
        temperatures: Sequence[float],
    ) -> None:
        assert engine.speech is not None, "the routes are there only if the model transcribes"
        self._speech: SpeechModel = engine.speech
        self._eos = frozenset(engine.model.eos_token_ids)
        self._run = run
        self._params = params
        self._temperatures = temperatures

    def prompt(self, clip: Clip, task: Task) -> Prompt:
        """What the model is given for a clip."""
        return self._speech.prompt(
            clip.audio,
            language=task.language,
            task=task.task,
            request_prompt=task.prompt,
            to_language=task.to_language,
            timestamps=task.timestamps,
        )

    async def hear(self, clip: Clip, task: Task) -> Heard:
        """The first attempt that looks right, or the last."""
        prompt, silence = self.prompt(clip, task), None
        if task.tell_silence:
            silence = await self._no_speech_prob(clip, task)
        for temperature in self._temperatures:
            heard = self._heard(
                clip, temperature, silence, await self._attempt(prompt, temperature)
            )
            improbable = (heard.avg_logprob or 0.0) < LEAST_LOGPROB
            if improbable and silence is None:
                silence = await self._no_speech_prob(clip, task)
            if improbable and silence is not None and silence > SILENCE:
                return self._heard(clip, temperature, silence, _NOTHING)
            if not improbable and heard.compression_ratio <= MOST_COMPRESSION:
                break
        return heard

    async def language(self, clip: Clip) -> str | None:
        """The language that is spoken, by the model's probe; None: it has none."""
        probe = self._speech.language_probe(clip.audio)
        if probe is None:
            return None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=sorted(probe.languages),
            detokenize=False,
        )
        part = await self._last(probe.prompt, params)
        return next((probe.languages[t] for t in part.token_ids if t in probe.languages), None)

    async def _attempt(self, prompt: Prompt, temperature: float) -> CompletionOutput:
        return await self._last(prompt, self._params(temperature))

    async def _last(self, prompt: Prompt, params: SamplingParams) -> CompletionOutput:
        """The completion of a request."""
        outputs, last = self._run(prompt, params), None
        try:
            async for output in outputs:
                last = output
        finally:
            await close(outputs)
        assert last is not None, "an engine yields at least one output"
        return last.outputs[0]

    def _heard(
        self,
        clip: Clip,
        temperature: float,
        silence: float | None,
        part: CompletionOutput,
    ) -> Heard:
        mean = None
        if part.cumulative_logprob is not None:
            mean = part.cumulative_logprob / max(1, len(part.token_ids))
        return Heard(
            clip=clip,
            text=part.text,
            token_ids=[token for token in part.token_ids if token not in self._eos],
            temperature=temperature,
            avg_logprob=mean,
            compression_ratio=compression_ratio(part.text),
            no_speech_prob=silence,
        )

    async def _no_speech_prob(self, clip: Clip, task: Task) -> float | None:
        """How likely it is that nobody speaks; None: the model does not say."""
        token = self._speech.no_speech_token_id
        if token is None:
            return None
        opening = first_token_of(
            self._speech.prompt(clip.audio, language=task.language, task=task.task)
        )
        if opening is None:
            return None
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=[token], detokenize=False
        )
        part = await self._last(opening, params)
        position = part.logprobs[0] if part.logprobs else None
        entry = position.get(token) if position else None
        return None if entry is None else math.exp(min(0.0, entry.logprob))


_NOTHING = CompletionOutput(0, "", [])


def compression_ratio(text: str) -> float:
    """How much smaller zlib makes a text; 1 for none."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if data else 1.0


def first_token_of(prompt: Prompt) -> Prompt | None:
    """The prompt up to its decoder's first token; None: it is not given as tokens."""
    found = _told(prompt)
    if found is None:
        return None
    field, ids = found
    return cast(Prompt, {**cast(Mapping[str, Any], prompt), field: ids[:1]})


def num_told(prompt: Prompt) -> int:
    """How many tokens a prompt gives to be continued; 0: it is not given as tokens."""
    found = _told(prompt)
    return 0 if found is None else len(found[1])


def _told(prompt: Prompt) -> tuple[str, list[int]] | None:
    """The field with the tokens that are continued, and these."""
    if not isinstance(prompt, Mapping):
        return None
    given = cast(Mapping[str, Any], prompt)
    for field in ("decoder_prompt", "prompt_token_ids"):
        ids = given.get(field)
        if isinstance(ids, list) and ids:
            return field, ids
    return None
