"""When what was heard was said: segments by the times among a clip's tokens, words by alignment."""

from __future__ import annotations

from collections.abc import Sequence

from headrace_core.engine import ServedModel
from headrace_core.listening.asks import Steps, aligned, computed, text_of
from headrace_core.listening.heard import Heard
from headrace_core.listening.prompts import num_told
from headrace_core.listening.segments import spans
from headrace_core.listening.timed import Segment, Word
from headrace_core.listening.words import TokenWord, words_of
from headrace_core.request import Prompt
from headrace_core.speech import SpeechModel

_BROKEN = "\N{REPLACEMENT CHARACTER}"


def segments(heard: Heard, speech: SpeechModel) -> Steps[list[Segment]]:
    """Those of a clip."""
    found: list[Segment] = []
    start = heard.clip.start
    for span in spans(heard.token_ids, speech.timestamp, heard.clip.audio.seconds):
        text = yield from text_of(span.text_tokens)
        found.append(
            Segment(
                id=len(found),
                seek=round(start * 100),
                start=round(start + span.start, 3),
                end=round(start + span.end, 3),
                text=text,
                tokens=span.tokens,
                temperature=heard.temperature,
                avg_logprob=heard.avg_logprob,
                compression_ratio=heard.compression_ratio,
                no_speech_prob=heard.no_speech_prob,
            )
        )
    return found


def words(
    plain: Prompt,
    output: Sequence[int],
    speech: SpeechModel,
    model: ServedModel,
    *,
    start: float,
    seconds: float,
    written: str | None,
) -> Steps[list[Word]]:
    """When a clip's words were spoken, by which part of it each token attends to.

    Args:
        plain: the clip's prompt, one that asks for no times.
        output: its tokens; times and ends among them are no words.
        start: where the clip begins.
        seconds: its length.
        written: language of the text.
    """
    ends = frozenset(model.eos_token_ids)
    spoken = [t for t in output if t not in ends and speech.timestamp(t) is None]
    # Without times a prompt may be longer: what filled the context may not fit any more.
    room = model.max_model_len - num_told(plain)
    spoken = spoken[:room]
    if not spoken:
        return []
    # The end token is aligned, too: where it begins the last word ends.
    sequence = [*spoken, *model.eos_token_ids[:1]][:room]
    weights = yield from aligned(speech.continued(plain, sequence))
    begins = yield from computed(lambda: speech.token_times(weights, len(sequence), seconds))
    times = [round(start + time, 2) for time in (*begins, seconds)]
    pieces = yield from _pieces(spoken)
    return [
        Word(word.text.strip(), times[word.begin], times[word.end])
        for word in words_of(pieces, written)
    ]


def _pieces(tokens: Sequence[int]) -> Steps[list[TokenWord]]:
    """Tokens with their texts; those that share a character together."""
    found, begin = list[TokenWord](), 0
    for end in range(1, len(tokens) + 1):
        text = yield from text_of(tokens[begin:end])
        if not text.endswith(_BROKEN) or end == len(tokens):
            found.append(TokenWord(text, begin, end))
            begin = end
    return found
