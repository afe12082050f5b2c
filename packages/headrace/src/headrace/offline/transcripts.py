"""Times of the words of transcripts, offline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt
from headrace_core.speech.model import SpeechModel
from headrace_core.speech.transcription import Word
from headrace_engine.transcription.recordings import need_speech
from headrace_engine.transcription.times import words

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine


class WordTime(NamedTuple):
    """A word, and when it was said, in seconds from the clip's beginning."""

    word: str
    start: float
    end: float


def word_times(
    engine: OfflineEngine,
    speech: SpeechModel | None,
    prompts: Sequence[Prompt],
    outputs: Sequence[RequestOutput],
    language: str | None,
) -> list[list[WordTime]]:
    """The words of each transcript.

    Raises:
        UnsupportedFeature: the model does not transcribe, or does not align.
        RequestError: a prompt has no clip as samples, or no text as token ids.
    """
    speech, calls = need_speech(speech, engine.model), engine.clip_requests()
    found: list[list[WordTime]] = [[] for _ in prompts]
    with engine.stepper() as stepper:
        for prompt, output, timed in zip(prompts, outputs, found, strict=True):
            _check_told(prompt)
            spoken = words(
                calls, prompt, output.outputs[0].token_ids, speech, engine.model,
                start=0.0, seconds=_seconds(prompt), written=language,
            )  # fmt: skip
            stepper.start(spoken, _noted(timed))
        stepper.finish()
    return found


def _noted(timed: list[WordTime]) -> Callable[[list[Word]], None]:
    return lambda found: timed.extend(WordTime(w.word, w.start, w.end) for w in found)


def _check_told(prompt: Any) -> None:
    """Refuse a prompt that does not say with which tokens a transcript begins."""
    given = prompt if isinstance(prompt, Mapping) else {}
    ids = given.get("decoder_prompt", given.get("prompt_token_ids"))
    if not isinstance(ids, list):
        raise RequestError(
            f"decoder_prompt = {ids!r:.100}: must be token ids, for the times of words",
            param="decoder_prompt",
        )


def _seconds(prompt: Any) -> float:
    """Seconds of a prompt's clip."""
    inner = prompt.get("encoder_prompt", prompt) if isinstance(prompt, Mapping) else {}
    audio = (inner.get("multi_modal_data") or {}).get("audio")
    if not isinstance(audio, tuple) or len(audio) != 2:
        raise RequestError(
            "multi_modal_data.audio: must be (samples, rate), for the times of words",
            param="multi_modal_data",
        )
    samples, rate = audio
    return float(len(samples) / rate)
