"""What the special tokens of a Whisper checkpoint mean: found by name, never by number.

The names are those of github.com/openai/whisper, ``tokenizer.py``. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.json_object import read_object
from headrace_models.config.special_tokens import special_tokens

SECONDS_PER_TIMESTAMP = 0.02

_LANGUAGE_LIST = (
    "en English, zh Chinese, de German, es Spanish, ru Russian, ko Korean, fr French, ja Japanese, "
    "pt Portuguese, tr Turkish, pl Polish, ca Catalan, nl Dutch, ar Arabic, sv Swedish, it Italian, "
    "id Indonesian, hi Hindi, fi Finnish, vi Vietnamese, he Hebrew, uk Ukrainian, el Greek, ms Malay, "
    "cs Czech, ro Romanian, da Danish, hu Hungarian, ta Tamil, no Norwegian, th Thai, ur Urdu, "
    "hr Croatian, bg Bulgarian, lt Lithuanian, la Latin, mi Maori, ml Malayalam, cy Welsh, sk Slovak, "
    "te Telugu, fa Persian, lv Latvian, bn Bengali, sr Serbian, az Azerbaijani, sl Slovenian, "
    "kn Kannada, et Estonian, mk Macedonian, br Breton, eu Basque, is Icelandic, hy Armenian, "
    "ne Nepali, mn Mongolian, bs Bosnian, kk Kazakh, sq Albanian, sw Swahili, gl Galician, "
    "mr Marathi, pa Punjabi, si Sinhala, km Khmer, sn Shona, yo Yoruba, so Somali, af Afrikaans, "
    "oc Occitan, ka Georgian, be Belarusian, tg Tajik, sd Sindhi, gu Gujarati, am Amharic, "
    "yi Yiddish, lo Lao, uz Uzbek, fo Faroese, ht Haitian Creole, ps Pashto, tk Turkmen, nn Nynorsk, "
    "mt Maltese, sa Sanskrit, lb Luxembourgish, my Myanmar, bo Tibetan, tl Tagalog, mg Malagasy, "
    "as Assamese, tt Tatar, haw Hawaiian, ln Lingala, ha Hausa, ba Bashkir, jw Javanese, "
    "su Sundanese, yue Cantonese"
)
LANGUAGES: Mapping[str, str] = {
    code: name for code, _, name in (entry.partition(" ") for entry in _LANGUAGE_LIST.split(", "))
}
"""Code -> name of all that any checkpoint knows."""


@dataclass(frozen=True, slots=True)
class WhisperTokens:
    """Ids of one checkpoint."""

    start: int
    end: int
    no_timestamps: int
    languages: Mapping[str, int]
    """Code -> id; empty: the checkpoint knows English only, and has no language or task tokens."""
    tasks: Mapping[str, int]
    """``transcribe``, ``translate``; empty with ``languages``."""
    previous: int | None
    """Stands before text that came before the clip."""
    no_speech: int | None

    @property
    def first_timestamp(self) -> int:
        """0.00 s; later ones follow it."""
        return self.no_timestamps + 1

    @property
    def multilingual(self) -> bool:
        return bool(self.languages)

    @classmethod
    def of(cls, path: Path, generation: Mapping[str, Any]) -> WhisperTokens:
        """From the checkpoint's tokenizer, and generation config where that says it.

        Args:
            generation: comes before the folder's own, which holds even where a user wants none of its
                defaults for sampling.

        Raises:
            UnsupportedModel: one that every Whisper has is in neither; or a file is unusable.
        """
        names = special_tokens(path)
        stored = read_object(path / "generation_config.json", required=False)
        generation = {**stored, **generation}
        languages = {
            code: token
            for code in LANGUAGES
            if (token := _language(code, names, generation)) is not None
        }
        if generation.get("is_multilingual") is False:
            languages = {}
        stated = _object(generation, "task_to_id")
        tasks = {
            task: token
            for task in ("transcribe", "translate")
            if (token := stated.get(task, names.get(f"<|{task}|>"))) is not None
        }
        previous = generation.get("prev_sot_token_id")
        return cls(
            start=_required(generation, "decoder_start_token_id", names, "<|startoftranscript|>"),
            end=_required(generation, "eos_token_id", names, "<|endoftext|>"),
            no_timestamps=_required(
                generation, "no_timestamps_token_id", names, "<|notimestamps|>"
            ),
            languages=languages,
            tasks=tasks if languages else {},
            previous=previous if _is_id(previous) else names.get("<|startofprev|>"),
            no_speech=names.get("<|nospeech|>", names.get("<|nocaptions|>")),
        )

    def begins_with(self, prompt: list[int]) -> int:
        """How many tokens of a sequence come before its transcript: previous text, the start, and
        what follows that of language, task and ``<|notimestamps|>``. 0: it has no start."""
        if self.start not in prompt:
            return 0
        end = len(prompt) - prompt[::-1].index(self.start)
        told = {*self.languages.values(), *self.tasks.values(), self.no_timestamps}
        while end < len(prompt) and prompt[end] in told:
            end += 1
        return end

    def says_timestamps(self, generation: Mapping[str, Any], vocab_size: int) -> bool:
        """Whether a transcript can begin with a timestamp, as each with timestamps does: some of them
        are in the vocabulary, early enough, and not suppressed.

        Raises:
            UnsupportedModel: what suppresses them, or says how late they may be, is malformed.
        """
        latest = latest_first(generation)
        end = vocab_size if latest is None else min(vocab_size, self.first_timestamp + latest + 1)
        never = {*listed_ids(generation, "suppress_tokens")}
        never |= {*listed_ids(generation, "begin_suppress_tokens")}
        return any(token not in never for token in range(self.first_timestamp, end))

    def wants_timestamps(self, prompt: list[int]) -> bool:
        """Whether what follows a prompt is a transcript with timestamps.

        Not if the prompt says so, and not if the language or the task is yet to come.
        """
        if self.start not in prompt:
            return False
        told = prompt[len(prompt) - prompt[::-1].index(self.start) :]
        if self.no_timestamps in told:
            return False
        return not self.multilingual or any(task in told for task in self.tasks.values())


def listed_ids(generation: Mapping[str, Any], key: str) -> list[int]:
    """A generation config's list of token ids, [] without one; -1 stands for none.

    Raises:
        UnsupportedModel: it is none.
    """
    value = generation.get(key)
    value = [] if value is None else value
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise UnsupportedModel(f"generation_config.json: {key} = {value!r:.200}: must be token ids")
    return [token for token in value if token >= 0]


def latest_first(generation: Mapping[str, Any]) -> int | None:
    """Index of the latest timestamp that a transcript may begin with; None: any.

    Raises:
        UnsupportedModel: it is no index.
    """
    value = generation.get("max_initial_timestamp_index")
    if value is not None and not _is_id(value):
        raise UnsupportedModel(
            f"generation_config.json: max_initial_timestamp_index = {value!r:.200}: must be a whole "
            "number of at least 0, or null"
        )
    return value


def _language(code: str, names: Mapping[str, int], generation: Mapping[str, Any]) -> int | None:
    name = f"<|{code}|>"
    token: int | None = _object(generation, "lang_to_id").get(name, names.get(name))
    return token


def _object(generation: Mapping[str, Any], key: str) -> Mapping[str, int]:
    value = generation.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(not _is_id(token) for token in value.values()):
        raise UnsupportedModel(f"generation_config.json: {key} = {value!r:.200}: must hold ids")
    return value


def _required(generation: Mapping[str, Any], key: str, names: Mapping[str, int], name: str) -> int:
    value = generation.get(key)
    value = names.get(name) if value is None else value
    value = value[0] if isinstance(value, list) and value else value
    if not _is_id(value):
        raise UnsupportedModel(
            f"the checkpoint has no token {name!r}: it must be in tokenizer.json, or its id in "
            f"generation_config.json as {key}, which is {value!r}"
        )
    assert isinstance(value, int)
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
