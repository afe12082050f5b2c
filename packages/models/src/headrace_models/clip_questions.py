"""Prompts of models that transcribe by answering a question about a clip. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace_core.errors import RequestError
from headrace_core.request import TextPrompt
from headrace_core.speech.model import AudioClip, SpeechTask
from headrace_models.config.special_tokens import refuse_special_tokens


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


def prompt_about(
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
