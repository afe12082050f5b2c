"""One clip at a time: attempts until one looks right, by the rules of Whisper's authors.

Radford et al. 2022, arXiv:2212.04356, section 4.5: greedy first, then with rising temperatures where the
text repeats itself or its tokens are improbable. Previous text is not carried from clip to clip, so
clips run side by side.
"""

from __future__ import annotations

import math

from headrace_core.output import CompletionOutput
from headrace_core.request import Prompt
from headrace_core.sampling.params import SamplingParams
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import SpeechModel
from headrace_core.speech.transcription import TranscriptionParams
from headrace_engine.transcription import times
from headrace_engine.transcription.calls import EngineCalls
from headrace_engine.transcription.hypothesis import Clip, Hypothesis, hypothesis
from headrace_engine.transcription.parts import TranscriptPart
from headrace_engine.transcription.prompts import first_token_of

LEAST_LOGPROB = -1.0
"""A mean log-probability below it looks wrong."""
MOST_COMPRESSION = 2.4
"""A text that compresses better repeats itself."""
SILENCE = 0.6
"""Probability of silence from which on improbable text is dropped."""
_NOTHING = CompletionOutput(0, "", [])


class Transcriber:
    """Transcribes the clips of a recording.

    Args:
        calls: what runs the requests.
        speech, model: the engine's.
        params: with the language, where it is known.
    """

    def __init__(
        self,
        calls: EngineCalls,
        speech: SpeechModel,
        model: ServedModel,
        params: TranscriptionParams,
    ) -> None:
        self._calls = calls
        self._speech = speech
        self._model = model
        self._eos = frozenset(model.eos_token_ids)
        self._params = params

    def prompt(self, clip: Clip) -> Prompt:
        """The model's prompt for a clip."""
        params = self._params
        return self._speech.prompt(
            clip.audio,
            language=params.language,
            task=params.task,
            request_prompt=params.prompt,
            to_language=params.to_language,
            timestamps=params.timestamps,
        )

    async def part(self, clip: Clip) -> TranscriptPart:
        """The transcript of a clip, with the segments and words that are asked for."""
        found = await self.hypothesis(clip)
        part = TranscriptPart(found.text)
        if self._params.timestamps:
            part.segments = await times.segments(self._calls, found, self._speech)
        if self._params.words:
            part.words = await times.words(
                self._calls, self._plain(clip), found.token_ids, self._speech, self._model,
                start=clip.start, seconds=clip.audio.seconds, written=self._params.written,
            )  # fmt: skip
        return part

    async def hypothesis(self, clip: Clip) -> Hypothesis:
        """The first attempt that looks right, or the last."""
        prompt, silence = self.prompt(clip), None
        if self._params.tell_silence:
            silence = await self._no_speech_prob(clip)
        for temperature in self._params.temperatures:
            sampling = self._params.attempt(self._model, temperature)
            completion = await self._calls.generate(prompt, sampling)
            found = self._judged(clip, completion, temperature, silence)
            improbable = (found.avg_logprob or 0.0) < LEAST_LOGPROB
            if improbable and silence is None:
                silence = await self._no_speech_prob(clip)
            if improbable and silence is not None and silence > SILENCE:
                return self._judged(clip, _NOTHING, temperature, silence)
            if not improbable and found.compression_ratio <= MOST_COMPRESSION:
                break
        return found

    def _judged(
        self, clip: Clip, part: CompletionOutput, temperature: float, silence: float | None
    ) -> Hypothesis:
        return hypothesis(
            clip, part, temperature=temperature, no_speech_prob=silence, eos_token_ids=self._eos
        )

    def _plain(self, clip: Clip) -> Prompt:
        """A prompt that asks for nothing but the text."""
        params = self._params
        return self._speech.prompt(clip.audio, language=params.language, task=params.task)

    async def _no_speech_prob(self, clip: Clip) -> float | None:
        """The probability that nobody speaks; None: the model does not say."""
        token = self._speech.no_speech_token_id
        opening = None if token is None else first_token_of(self._plain(clip))
        if token is None or opening is None:
            return None
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=[token], detokenize=False
        )
        part = await self._calls.generate(opening, params)
        position = part.logprobs[0] if part.logprobs else None
        entry = position.get(token) if position else None
        return None if entry is None else math.exp(min(0.0, entry.logprob))


async def find_language(calls: EngineCalls, speech: SpeechModel, clip: Clip) -> str | None:
    """The language that is spoken, by the model's probe; None: the model has none."""
    probe = speech.language_probe(clip.audio)
    if probe is None:
        return None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=sorted(probe.languages),
        detokenize=False,
    )
    part = await calls.generate(probe.prompt, params)
    return next((probe.languages[t] for t in part.token_ids if t in probe.languages), None)
