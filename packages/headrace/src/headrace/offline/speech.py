"""Speech as text: ``LLM.transcribe``, ``translate``, ``align``, ``word_times``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.offline.arguments import as_prompts, need_one_each
from headrace.offline.engine import EngineMixin
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.llm_engine import LLMEngine
    from headrace.offline.recordings import Recording
    from headrace.offline.transcripts import WordTime
    from headrace_core.speech.model import SpeechTask
    from headrace_core.speech.transcription import Transcript
    from headrace_multimodal.audio.decoding import AudioDecoder


class TranscriptionMixin(EngineMixin):
    """Writes down what is said in recordings."""

    def __init__(self, llm_engine: LLMEngine) -> None:
        super().__init__(llm_engine)
        self._decoder_lock = threading.Lock()
        # Guarded by the lock:
        self._decoder: AudioDecoder | None = None

    def transcribe(
        self,
        audio: Recording | Sequence[Recording],
        *,
        language: str | None = None,
        to_language: str | None = None,
        prompt: str = "",
        timestamp_granularities: Sequence[str] | None = None,
        temperature: float | Sequence[float] = 0.0,
        use_tqdm: bool | Callable[..., Any] = True,
        **sampling: Any,
    ) -> list[Transcript]:
        """Write down what is said in recordings, however long they are.

        They are decoded one ahead of another and cut where they are quietest; the clips of all run side
        by side. What is computed is what ``/v1/audio/transcriptions`` computes.

        Args:
            audio: a file's path, a file's bytes, or (samples, samples a second), [n] or [channels, n]
                floats from -1 to 1; one or a list.
            language: what is spoken, such as ``en``; None: found out, if the model can.
            to_language: what it is to become, for models that can choose.
            prompt: preceding text, or an example of names and style.
            timestamp_granularities: of ``segment`` and ``word``; None: segments, if the model tells
                times.
            temperature: 0: greedy, and again with up to 1 where a clip's text looks wrong; several:
                tried one after the other.
            use_tqdm: show seconds of sound on a progress bar; or a callable that makes one.
            sampling: further fields of :class:`SamplingParams`: ``top_p``, ``seed``, ``max_tokens`` (of
                each clip), ...; see :data:`headrace.offline.transcribing.SAMPLING`.

        Returns:
            One transcript per recording, in order: ``text``, ``language``, ``duration``, ``segments``,
            ``words``, and :meth:`~headrace_core.speech.transcription.Transcript.srt` of it.

        Raises:
            UnsupportedFeature: the model does not transcribe, or gives no such times.
            OSError: a file cannot be read.
            RequestError: a recording is no audio, or a value is wrong; nothing is left running.
            GenerateError: a clip failed.
            MissingDependency: the libraries that decode audio are not installed.
        """
        return self._transcribe(
            "transcribe", audio, use_tqdm, language=language, to_language=to_language, prompt=prompt,
            timestamps=timestamp_granularities, temperature=temperature, sampling=sampling,
        )  # fmt: skip

    def translate(
        self,
        audio: Recording | Sequence[Recording],
        *,
        language: str | None = None,
        to_language: str | None = None,
        prompt: str = "",
        timestamp_granularities: Sequence[str] | None = None,
        temperature: float | Sequence[float] = 0.0,
        use_tqdm: bool | Callable[..., Any] = True,
        **sampling: Any,
    ) -> list[Transcript]:
        """Write down in another language, which is English for Whisper, what is said in recordings;
        arguments, results and errors as :meth:`transcribe`."""
        return self._transcribe(
            "translate", audio, use_tqdm, language=language, to_language=to_language, prompt=prompt,
            timestamps=timestamp_granularities, temperature=temperature, sampling=sampling,
        )  # fmt: skip

    def _transcribe(
        self, task: SpeechTask, audio: Any, use_tqdm: bool | Callable[..., Any], **wanted: Any
    ) -> list[Transcript]:
        from headrace.assembly.speech.served import offline_decoder
        from headrace.offline.recordings import as_recordings
        from headrace.offline.transcribing import OfflineTranscription, TranscriptionOptions
        from headrace_engine.transcription.recordings import need_speech

        speech = need_speech(self.llm_engine.front.speech, self.engine.model)
        with self._decoder_lock:
            if self._decoder is None:
                self._decoder = offline_decoder(self.engine_config.speech)
        transcription = OfflineTranscription(self.engine, speech, self._decoder)
        return transcription.run(
            as_recordings(audio), TranscriptionOptions(task=task, **wanted), use_tqdm
        )

    def align(self, prompts: Prompt | Sequence[Prompt]) -> list[Tensor]:
        """Part of the media that each token of a sequence comes from: for the times of words.

        Args:
            prompts: whole sequences with their media, output included, one or a list; for Whisper
                ``{"encoder_prompt": ..., "decoder_prompt": token ids}``.

        Returns:
            One float32 tensor [tokens, encoder states] for each, in order
            (:meth:`headrace_core.model.SupportsAlignment.align`).

        Raises:
            UnsupportedFeature: the checkpoint names no heads that align.
            RequestError: a sequence is wrong; nothing is left running.
        """
        from headrace.offline.pooling import as_tensor

        return [as_tensor(weights) for weights in self.engine.align(as_prompts(prompts))]

    def word_times(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Sequence[RequestOutput],
        *,
        language: str | None = None,
    ) -> list[list[WordTime]]:
        """When the words of transcripts were said.

        Args:
            prompts: those of :meth:`generate`, each with one clip as ``(samples, rate)`` and its text
                as token ids.
            outputs: what came of them.
            language: of the transcripts, an ISO 639-1 code; matters where words stand without spaces.

        Returns:
            The words of each transcript, with their times in seconds.

        Raises: as :meth:`align`.
        """
        from headrace.offline.transcripts import word_times

        every = as_prompts(prompts)
        need_one_each("outputs", outputs, len(every))
        return word_times(self.engine, self.llm_engine.front.speech, every, outputs, language)

    def close(self) -> None:
        """Stop the engine and free model and cache. Idempotent."""
        super().close()
        self._close_decoder()

    def _close_decoder(self) -> None:
        if self._decoder is not None:
            self._decoder.close()

    def __del__(self) -> None:
        # Interpreter shutdown may have taken away what closing needs.
        with contextlib.suppress(Exception):
            self._close_decoder()
