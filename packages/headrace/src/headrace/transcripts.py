"""Times of the words of transcripts, offline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.output import RequestOutput
from headrace_core.request import Prompt
from headrace_core.speech import SpeechModel

if TYPE_CHECKING:
    from headrace_engine.offline import OfflineEngine
    from headrace_server.speech.words import TokenWord

_BROKEN = "\N{REPLACEMENT CHARACTER}"


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
    if speech is None:
        raise UnsupportedFeature(f"{engine.model.name}: does not transcribe", param="model")
    spoken, sequences = list[list[int]](), list[list[int]]()
    for prompt, output in zip(prompts, outputs):
        room = engine.model.max_model_len - _num_told(prompt)
        spoken.append(_spoken(engine, speech, output)[:room])
        # The end token is aligned, too: where it begins the last word ends.
        sequences.append([*spoken[-1], *engine.model.eos_token_ids[:1]][:room])
    continued = [speech.continued(*both) for both in zip(prompts, sequences)]
    found = []
    for prompt, tokens, sequence, weights in zip(
        prompts, spoken, sequences, engine.align(continued)
    ):
        seconds = _seconds(prompt)
        starts = speech.token_times(weights, len(sequence), seconds)
        times = [round(time, 2) for time in (*starts, seconds)]
        words = _words(engine, tokens, language)
        found.append([WordTime(w.text.strip(), times[w.begin], times[w.end]) for w in words])
    return found


def _spoken(engine: OfflineEngine, speech: SpeechModel, output: RequestOutput) -> list[int]:
    """A transcript's tokens without its end and those that say times."""
    tokens, ends = output.outputs[0].token_ids, engine.model.eos_token_ids
    return [token for token in tokens if token not in ends and speech.timestamp(token) is None]


def _num_told(prompt: Any) -> int:
    """Tokens that a prompt begins a transcript with."""
    given = prompt if isinstance(prompt, Mapping) else {}
    ids = given.get("decoder_prompt", given.get("prompt_token_ids"))
    if not isinstance(ids, list):
        raise RequestError(
            f"decoder_prompt = {ids!r:.100}: must be token ids, for the times of words",
            param="decoder_prompt",
        )
    return len(ids)


def _seconds(prompt: Any) -> float:
    """How long a prompt's clip is."""
    inner = prompt.get("encoder_prompt", prompt) if isinstance(prompt, Mapping) else {}
    audio = (inner.get("multi_modal_data") or {}).get("audio")
    if not isinstance(audio, tuple) or len(audio) != 2:
        raise RequestError(
            "multi_modal_data.audio: must be (samples, rate), for the times of words",
            param="multi_modal_data",
        )
    samples, rate = audio
    return float(len(samples) / rate)


def _words(engine: OfflineEngine, tokens: Sequence[int], language: str | None) -> list[TokenWord]:
    from headrace_server.speech.words import TokenWord, words_of

    tokenizer = engine.tokenizer
    assert tokenizer is not None  # what transcribes has one
    pieces, begin = [], 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[begin:end], skip_special_tokens=True)
        if not text.endswith(_BROKEN) or end == len(tokens):
            pieces.append(TokenWord(text, begin, end))
            begin = end
    return words_of(pieces, language)
