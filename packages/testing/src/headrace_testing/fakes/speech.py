"""A speech model without a model, for tests of whatever sits on one, beside a fake engine.

It reads WAV files of 16 bits and one channel with the standard library. Its prompts are texts that say
what was asked for and where the clip lies, such as ``transcribe:en:0.0``, so that a
:class:`~headrace_testing.fakes.engine.FakeEngine`'s ``reply`` can answer each as a test likes. Times are
characters (:func:`time_mark`), as the fake engine's tokens are.
"""

from __future__ import annotations

import array
import io
import wave
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError
from headrace_core.request import Prompt, TokensPrompt
from headrace_core.speech.model import AudioClip, LanguageProbe, SpeechTask, SpeechToTextConfig

_FIRST_TIME = 0xE000
NO_SPEECH = 0xF000
"""Token for silence."""
PROBE = "probe"
"""Prompt that asks for the language; answered by a character of :data:`PROBED`."""
PROBED: Mapping[str, str] = {"E": "en", "D": "de"}


def time_mark(seconds: float) -> str:
    """The character that stands for a time, in steps of 0.02 seconds."""
    return chr(_FIRST_TIME + round(seconds * 50))


def wav_file(samples: Sequence[int], sample_rate: int = 16_000) -> bytes:
    """A file of one channel, 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(sample_rate)
        out.writeframes(array.array("h", samples).tobytes())
    return file.getvalue()


class FakeSpeech:
    """A :class:`~headrace_core.speech.model.SpeechModel`.

    Args:
        config: how audio is prepared; cut at its very limit.
        segment_timestamps, word_timestamps: whether it has them.
        probes: whether it finds languages out.
        max_file_bytes: of an upload.
        no_speech: whether it knows of silence.
    """

    def __init__(
        self,
        config: SpeechToTextConfig | None = None,
        *,
        segment_timestamps: bool = True,
        word_timestamps: bool = False,
        probes: bool = False,
        max_file_bytes: int = 25 << 20,
        no_speech: bool = False,
    ) -> None:
        self._config = config or SpeechToTextConfig()
        self.segment_timestamps = segment_timestamps
        self.word_timestamps = word_timestamps
        self.max_file_bytes = max_file_bytes
        self.languages: Mapping[str, str] = {"en": "English", "de": "German", "ja": "Japanese"}
        self.no_speech_token_id = NO_SPEECH if no_speech else None
        self.seconds_per_state = None
        self.closed = False
        self._probes = probes
        self._starts: dict[int, float] = {}

    def config(self, task: SpeechTask) -> SpeechToTextConfig:
        return self._config

    def validate_language(self, language: str | None) -> str | None:
        if language is None or language in self.languages:
            return language
        raise RequestError(
            f"language = {language!r}: must be one of {', '.join(self.languages)}", param="language"
        )

    def prompt(
        self,
        audio: AudioClip,
        *,
        language: str | None,
        task: SpeechTask,
        request_prompt: str = "",
        to_language: str | None = None,
        timestamps: bool = False,
    ) -> Prompt:
        words = [task, language or "?", f"{self._starts.get(id(audio.samples), 0.0):.1f}"]
        words += ["timed"] * timestamps + [f"to {to_language}"] * (to_language is not None)
        text = ":".join([*words, request_prompt] if request_prompt else words)
        return TokensPrompt(
            prompt_token_ids=[ord(c) for c in text],
            multi_modal_data={"audio": (audio.samples, audio.sample_rate)},
        )

    def num_audio_tokens(self, seconds: float, task: SpeechTask) -> int | None:
        return round(seconds * 10)

    def language_probe(self, audio: AudioClip) -> LanguageProbe | None:
        languages = {ord(letter): code for letter, code in PROBED.items()}
        return LanguageProbe(PROBE, languages) if self._probes else None

    def timestamp(self, token_id: int) -> float | None:
        index = token_id - _FIRST_TIME
        return index / 50 if 0 <= index <= 1500 else None

    def continued(self, prompt: Prompt, output: Sequence[int]) -> Prompt:
        given: Any = prompt
        return TokensPrompt(prompt_token_ids=[*given["prompt_token_ids"], *output])

    def token_times(self, weights: PackedArray, num_tokens: int, seconds: float) -> list[float]:
        """Evenly."""
        return [seconds * i / num_tokens for i in range(num_tokens)]

    async def decode(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        try:
            with wave.open(io.BytesIO(data)) as file:
                numbers = array.array("h", file.readframes(file.getnframes()))
        except (wave.Error, EOFError) as error:
            raise RequestError(f"file {name!r}: damaged", param="file") from error
        return AudioClip(array.array("f", (n / 32768 for n in numbers)), sample_rate)

    def split(self, audio: AudioClip, config: SpeechToTextConfig) -> list[AudioClip]:
        limit = config.max_audio_clip_s
        if limit is None or audio.seconds <= limit:
            return [audio]
        size = int(limit * audio.sample_rate)
        starts = range(0, len(audio.samples), size)
        clips = [AudioClip(audio.samples[s : s + size], audio.sample_rate) for s in starts]
        self._kept = clips  # so that no two have one id
        self._starts = {
            id(clip.samples): s / audio.sample_rate for clip, s in zip(clips, starts, strict=True)
        }
        return clips

    def close(self) -> None:
        self.closed = True
