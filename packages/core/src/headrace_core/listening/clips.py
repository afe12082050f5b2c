"""One clip at a time: attempts until one looks right, by the rules of Whisper's authors.

Radford et al. 2022, arXiv:2212.04356, section 4.5: greedy first, then with rising temperatures where the
text repeats itself or its tokens are improbable. Previous text is not carried from clip to clip, so
clips run side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_core.engine import ServedModel
from headrace_core.listening import times
from headrace_core.listening.asks import Steps, generated
from headrace_core.listening.heard import Clip, Heard, heard
from headrace_core.listening.prompts import first_token_of
from headrace_core.listening.transcript import Part, Task
from headrace_core.output import CompletionOutput
from headrace_core.request import Prompt
from headrace_core.sampling import RequestOutputKind, SamplingParams
from headrace_core.speech import SpeechModel

LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Temperatures that are tried where nobody asks for others."""
LEAST_LOGPROB = -1.0
"""A mean log-probability below it looks wrong."""
MOST_COMPRESSION = 2.4
"""A text that compresses better repeats itself."""
SILENCE = 0.6
"""Where nobody speaking is likelier, improbable text is none."""
_NOTHING = CompletionOutput(0, "", [])


class Listener:
    """Hears clips. Its methods are steps (:mod:`headrace_core.listening.asks`).

    Args:
        speech: of the engine that answers.
        model: the engine's.
        params: sampling parameters at a temperature.
        temperatures: tried in this order.
    """

    def __init__(
        self,
        speech: SpeechModel,
        model: ServedModel,
        params: Callable[[float], SamplingParams],
        temperatures: Sequence[float],
    ) -> None:
        self._speech = speech
        self._model = model
        self._eos = frozenset(model.eos_token_ids)
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

    def part(self, clip: Clip, task: Task) -> Steps[Part]:
        """All that a task wants of a clip."""
        found = yield from self.hear(clip, task)
        part = Part(found.text)
        if task.timestamps:
            part.segments = yield from times.segments(found, self._speech)
        if task.words:
            part.words = yield from times.words(
                self._plain(clip, task), found.token_ids, self._speech, self._model,
                start=clip.start, seconds=clip.audio.seconds, written=task.written,
            )  # fmt: skip
        return part

    def hear(self, clip: Clip, task: Task) -> Steps[Heard]:
        """The first attempt that looks right, or the last."""
        prompt, silence = self.prompt(clip, task), None
        if task.tell_silence:
            silence = yield from self._no_speech_prob(clip, task)
        for temperature in self._temperatures:
            completion = yield from generated(prompt, self._params(temperature))
            found = self._heard(clip, completion, temperature, silence)
            improbable = (found.avg_logprob or 0.0) < LEAST_LOGPROB
            if improbable and silence is None:
                silence = yield from self._no_speech_prob(clip, task)
            if improbable and silence is not None and silence > SILENCE:
                return self._heard(clip, _NOTHING, temperature, silence)
            if not improbable and found.compression_ratio <= MOST_COMPRESSION:
                break
        return found

    def language(self, clip: Clip) -> Steps[str | None]:
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
        part = yield from generated(probe.prompt, params)
        return next((probe.languages[t] for t in part.token_ids if t in probe.languages), None)

    def _heard(
        self, clip: Clip, part: CompletionOutput, temperature: float, silence: float | None
    ) -> Heard:
        return heard(
            clip, part, temperature=temperature, no_speech_prob=silence, eos_token_ids=self._eos
        )

    def _plain(self, clip: Clip, task: Task) -> Prompt:
        """A prompt that asks for nothing but the text."""
        return self._speech.prompt(clip.audio, language=task.language, task=task.task)

    def _no_speech_prob(self, clip: Clip, task: Task) -> Steps[float | None]:
        """How likely it is that nobody speaks; None: the model does not say."""
        token = self._speech.no_speech_token_id
        opening = None if token is None else first_token_of(self._plain(clip, task))
        if token is None or opening is None:
            return None
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=[token], detokenize=False
        )
        part = yield from generated(opening, params)
        position = part.logprobs[0] if part.logprobs else None
        entry = position.get(token) if position else None
        return None if entry is None else math.exp(min(0.0, entry.logprob))


def attempt_params(
    model: ServedModel,
    temperature: float,
    given: Mapping[str, Any],
    *,
    streamed: bool = False,
) -> SamplingParams:
    """Sampling parameters of one attempt.

    Args:
        given: what the caller asks for; the rest is the model's default. Of two ``max_tokens`` the
            smaller counts.
        streamed: each output holds what is new; nobody will judge the whole.
    """
    defaults = model.default_sampling_params
    limits = [v for v in (defaults.get("max_tokens"), given.get("max_tokens")) if v is not None]
    values = {**defaults, **given, "temperature": temperature}
    values["max_tokens"] = min(limits, default=None)
    return SamplingParams.from_optional(
        **values,
        logprobs=None if streamed else 0,
        output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )
