"""Speech to text: what a model's class says, and what a server sees of it. Imports no torch.

A class says what it can by being a :class:`SupportsTranscription`; whoever composes an engine makes a
:class:`SpeechModel` of it and of a decoder for uploads, and the routes need nothing else. What a class
that should transcribe lacks is told by :mod:`headrace_core.speech.diagnosis`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol

from headrace_core.errors import ModelError, RequestError

if TYPE_CHECKING:
    from headrace_core.arrays import PackedArray
    from headrace_core.model import ModelInfo
    from headrace_core.request import Prompt

SpeechTask = Literal["transcribe", "translate"]
SPEECH_TASKS: tuple[SpeechTask, ...] = ("transcribe", "translate")
ALIGN_TASK = "align"
"""Among a model's tasks: it tells which part of its audio each token comes from."""


@dataclass(frozen=True, slots=True)
class SpeechToTextConfig:
    """Preparation of audio for a model.

    Raises:
        ValueError: a value is out of range.
    """

    sample_rate: int = 16000
    """Samples a second, of one channel."""
    max_audio_clip_s: float | None = 30.0
    """Longest clip that the model takes at once; None: any."""
    overlap_chunk_second: float = 1.0
    """Long audio is cut in this last stretch of each clip; clips share no samples."""
    min_energy_split_window_size: int | None = 1600
    """Samples of the stretch whose quietest place is where it is cut; None: longer audio is refused."""

    def __post_init__(self) -> None:
        clip, window = self.max_audio_clip_s, self.min_energy_split_window_size
        good = (
            self.sample_rate > 0
            and (clip is None or clip > 0)
            and 0 < self.overlap_chunk_second < (clip or float("inf"))
            and (window is None or window > 0)
        )
        if not good:
            raise ValueError(f"{self}: values must be above 0, the overlap shorter than a clip")

    @property
    def allow_audio_chunking(self) -> bool:
        """True if audio that is too long may be cut."""
        return self.min_energy_split_window_size is not None


class AudioClip(NamedTuple):
    """Decoded audio."""

    samples: Any
    """[n] float32, one channel, -1..1: a numpy array."""
    sample_rate: int

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.sample_rate


class LanguageProbe(NamedTuple):
    """Detection of the spoken language: by the token that follows a prompt."""

    prompt: Prompt
    languages: Mapping[int, str]
    """Token id -> language code; the likeliest of these tokens is the answer."""


class SupportsTranscription:
    """A model class that turns speech into text. Inheriting it is all that is needed to be served.

    ``supported_languages`` is checked when a class is defined. The abstract methods are required. This
    is no ABC all the same: a class that lacks one can be built and serves its other tasks, and the
    diagnosis says what is missing, where an ABC would only keep the engine from starting.
    """

    supports_transcription: ClassVar[bool] = True
    supported_languages: ClassVar[Mapping[str, str]]
    """ISO 639-1 code (ISO 639-3 where there is none) -> name in English."""
    supports_transcription_only: ClassVar[bool] = False
    """True: it generates no other text."""
    supports_segment_timestamp: ClassVar[bool] = False
    """True: its tokens say when segments begin and end."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "supported_languages" in vars(cls):
            check_languages(cls.__qualname__, vars(cls)["supported_languages"])

    @classmethod
    @abstractmethod
    def get_speech_to_text_config(
        cls, model_config: ModelInfo, task_type: SpeechTask
    ) -> SpeechToTextConfig:
        """Preparation of audio for this checkpoint."""

    @classmethod
    @abstractmethod
    def get_generation_prompt(
        cls,
        audio: AudioClip,
        model_config: ModelInfo,
        stt_config: SpeechToTextConfig,
        language: str | None,
        task_type: SpeechTask,
        request_prompt: str,
        to_language: str | None,
        timestamps: bool = False,
    ) -> Prompt:
        """The prompt for one clip; called with those keywords that a class declares.

        ``timestamps``: one that asks for them, where ``supports_segment_timestamp``.
        """

    @classmethod
    def validate_language(cls, language: str | None) -> str | None:
        """The language to use. Raises: RequestError listing the supported ones."""
        known = isinstance(language, str) and language in cls.supported_languages
        if language is None or known:
            return language
        raise RequestError(
            f"language = {language!r}: must be one of {', '.join(sorted(cls.supported_languages))}",
            param="language",
            value=language,
        )

    @classmethod
    def get_num_audio_tokens(
        cls, audio_duration_s: float, stt_config: SpeechToTextConfig, model_config: ModelInfo
    ) -> int | None:
        """Prompt tokens that audio of this length takes, without computing; None: unknown."""
        return None

    @classmethod
    def get_language_probe(
        cls, audio: AudioClip, model_config: ModelInfo, stt_config: SpeechToTextConfig
    ) -> LanguageProbe | None:
        """Detection of the language of a clip; None: not possible."""
        return None

    @classmethod
    def get_timestamp(cls, token_id: int, model_config: ModelInfo) -> float | None:
        """Seconds from the clip's beginning that a token stands for; None: it is no such token."""
        return None

    @classmethod
    def says_timestamps(cls, model_config: ModelInfo) -> bool:
        """True if this checkpoint may write timestamp tokens; for classes with
        ``supports_segment_timestamp``."""
        return True

    @classmethod
    def get_no_speech_token_id(cls, model_config: ModelInfo) -> int | None:
        """The token whose probability, right after the first token of the prompt, says that nobody
        speaks; None: there is none."""
        return None

    @classmethod
    def get_seconds_per_state(cls, model_config: ModelInfo) -> float | None:
        """Seconds of audio per encoder state, of a class that aligns words; None: the states that
        :meth:`~headrace_core.model.SupportsAlignment.align` tells of share the clip evenly."""
        return None


def check_languages(name: str, languages: object) -> None:
    """Raises: ModelError naming what is wrong with a class's ``supported_languages``."""
    if not isinstance(languages, Mapping) or not languages:
        raise ModelError(
            f"{name}.supported_languages = {languages!r:.100}: must map ISO 639 codes to names"
        )
    bad = [code for code, title in languages.items() if not _is_code(code) or not title]
    if bad:
        raise ModelError(
            f"{name}.supported_languages: {bad} are not ISO 639 codes (two or three small letters) "
            "with a name"
        )


def _is_code(code: object) -> bool:
    return (
        isinstance(code, str)
        and code.isascii()
        and code.isalpha()
        and (code.islower() and len(code) in (2, 3))
    )


class SpeechMembers(Protocol):
    """Members that a class has for a checkpoint: it is asked with those keywords that it declares."""

    @property
    def languages(self) -> Mapping[str, str]:
        """Code -> name."""

    @property
    def segment_timestamps(self) -> bool:
        """See :attr:`SupportsTranscription.supports_segment_timestamp` and
        :meth:`~SupportsTranscription.says_timestamps`."""

    def config(self, task: SpeechTask) -> SpeechToTextConfig: ...

    def validate_language(self, language: str | None) -> str | None:
        """See :meth:`SupportsTranscription.validate_language`."""

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
        """See :meth:`SupportsTranscription.get_generation_prompt`; with ``timestamps``, for a model
        that has them, one that asks for them."""

    def num_audio_tokens(self, seconds: float, task: SpeechTask) -> int | None: ...

    def language_probe(self, audio: AudioClip) -> LanguageProbe | None: ...

    def timestamp(self, token_id: int) -> float | None: ...

    @property
    def no_speech_token_id(self) -> int | None: ...

    @property
    def seconds_per_state(self) -> float | None:
        """See :meth:`SupportsTranscription.get_seconds_per_state`."""


class SpeechModel(SpeechMembers, Protocol):
    """Speech to text as an engine offers it, next to ``generate``. Torch-free to use."""

    @property
    def word_timestamps(self) -> bool:
        """True if :meth:`EngineClient.align` gives the times of words."""

    def continued(self, prompt: Prompt, output: Sequence[int]) -> Prompt:
        """Input of :meth:`EngineClient.align`: a prompt of :meth:`prompt` and the output after it."""

    def token_times(self, weights: PackedArray, num_tokens: int, seconds: float) -> list[float]:
        """When each of the last ``num_tokens`` tokens of an aligned sequence begins.

        Args:
            weights: of :meth:`EngineClient.align`.
            seconds: length of the clip.

        Returns:
            Seconds from the clip's beginning, never decreasing.
        """

    @property
    def max_file_bytes(self) -> int:
        """Longest upload that :meth:`decode` takes; a longer one need not be read."""

    async def decode(self, data: bytes, *, name: str, sample_rate: int) -> AudioClip:
        """An uploaded file as one channel of that rate. Decoded in a process that can be killed.

        Raises:
            RequestError: it is no audio, is damaged, or is longer than allowed; says which.
            QueueFull: too many files wait to be decoded.
            MissingDependency: the libraries for it are not installed.
        """

    def split(self, audio: AudioClip, config: SpeechToTextConfig) -> list[AudioClip]:
        """Clips that the model takes, in order; together they are the whole audio, and no sample is in
        two of them.

        Raises:
            RequestError: it is too long and may not be cut.
        """

    def close(self) -> None:
        """End the processes that decode. Idempotent."""
