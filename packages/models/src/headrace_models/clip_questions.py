"""Prompts of models that transcribe by answering a question about a clip. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from headrace_core.errors import RequestError
from headrace_core.request import TextPrompt
from headrace_core.speech.model import AudioClip, SpeechTask
from headrace_models.config.special_tokens import refuse_special_tokens

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_core.speech.model import SpeechToTextConfig


class ClipQuestion(NamedTuple):
    """A model's own wording. ``{spoken}`` stands for the language that is spoken and a space, or for nothing;
    ``{target}`` for the language of a translation."""

    transcribe: str
    translate: str

    def text(
        self,
        languages: Mapping[str, str],
        language: str | None,
        task: SpeechTask,
        to_language: str | None,
    ) -> str:
        """The question.

        Args:
            languages: code -> name, of those that the model knows.
            language: code of what is spoken; None: it is not known.
            to_language: code of the language of the text; None: what is spoken, or English of a translation.

        Raises:
            RequestError: a target language that the model does not know, or another one than what is spoken
                for a transcript.
        """
        spoken = f"{languages[language]} " if language else ""
        if task == "transcribe" and to_language in (None, language):
            return self.transcribe.format(spoken=spoken)
        if task == "translate" and (to_language or "en") in languages:
            return self.translate.format(spoken=spoken, target=languages[to_language or "en"])
        raise RequestError(
            f"to_language = {to_language!r}: /v1/audio/translations translates into one of "
            f"{', '.join(sorted(languages))}",
            param="to_language",
            value=to_language,
        )


class AnswersAboutClips:
    """Beside :class:`~headrace_core.speech.model.SupportsTranscription`: a transcript is the answer to a
    question about a clip."""

    clip_question: ClassVar[ClipQuestion]
    conversation: ClassVar[str]
    """A prompt with a clip; ``{}`` stands for the question."""
    supported_languages: ClassVar[Mapping[str, str]]

    @classmethod
    def conversation_of(cls, path: Path) -> str:
        """:attr:`conversation`, or that of the checkpoint in a folder."""
        return cls.conversation

    @classmethod
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
    ) -> TextPrompt:
        """The question, behind a client's own text if there is one.

        Raises:
            RequestError: a target language that the model does not know, or another one than what is spoken
                for a transcript; special tokens in the request's prompt; timestamps, which it does not say.
        """
        if timestamps:
            raise RequestError(
                "timestamps: the model says none; leave timestamp_granularities out",
                param="timestamp_granularities",
            )
        question = cls.clip_question.text(cls.supported_languages, language, task_type, to_language)
        form = cls.conversation_of(model_config.path)
        return _prompt_about(audio, form, question, request_prompt, model_config.path)


def _prompt_about(
    clip: AudioClip, form: str, question: str, request_prompt: str, path: Path
) -> TextPrompt:
    """A prompt with a clip and a question about it.

    Args:
        form: of the conversation; ``{}`` stands for the question.
        request_prompt: a client's text, which comes before the question; "": none.
        path: folder of the checkpoint, whose special tokens that text must not spell.

    Raises:
        RequestError: it does.
    """
    if request_prompt.strip():
        refuse_special_tokens(path, request_prompt)
        question = f"{request_prompt.strip()}\n{question}"
    media = {"audio": (clip.samples, clip.sample_rate)}
    return TextPrompt(prompt=form.replace("{}", question), multi_modal_data=media)
