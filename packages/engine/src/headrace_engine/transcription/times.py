"""Times of a transcript: segments by the times among a clip's tokens, words by alignment."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace_core.request import Prompt
from headrace_core.served_model import ServedModel
from headrace_core.speech.model import SpeechModel
from headrace_core.speech.transcription import Segment, Word
from headrace_engine.transcription.calls import EngineCalls
from headrace_engine.transcription.hypothesis import Hypothesis
from headrace_engine.transcription.joining import UNSPACED
from headrace_engine.transcription.prompts import num_given

_BROKEN = "\N{REPLACEMENT CHARACTER}"


async def segments(calls: EngineCalls, attempt: Hypothesis, speech: SpeechModel) -> list[Segment]:
    """The segments of a clip."""
    found: list[Segment] = []
    start = attempt.clip.start
    for span in spans(attempt.token_ids, speech.timestamp, attempt.clip.audio.seconds):
        text = await calls.detokenize(span.text_tokens)
        found.append(
            Segment(
                id=len(found),
                seek=round(start * 100),
                start=round(start + span.start, 3),
                end=round(start + span.end, 3),
                text=text,
                tokens=span.tokens,
                temperature=attempt.temperature,
                avg_logprob=attempt.avg_logprob,
                compression_ratio=attempt.compression_ratio,
                no_speech_prob=attempt.no_speech_prob,
            )
        )
    return found


async def words(
    calls: EngineCalls,
    plain: Prompt,
    output: Sequence[int],
    speech: SpeechModel,
    model: ServedModel,
    *,
    start: float,
    seconds: float,
    written: str | None,
) -> list[Word]:
    """The words of a clip and their times, by which part of it each token attends to.

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
    room = model.max_model_len - num_given(plain)
    spoken = spoken[:room]
    if not spoken:
        return []
    # The end token is aligned, too: where it begins the last word ends.
    sequence = [*spoken, *model.eos_token_ids[:1]][:room]
    weights = await calls.align(speech.continued(plain, sequence))
    begins = await calls.compute(lambda: speech.token_times(weights, len(sequence), seconds))
    times = [round(start + time, 2) for time in (*begins, seconds)]
    pieces = await _pieces(calls, spoken)
    return [
        Word(word.text.strip(), times[word.begin], times[word.end])
        for word in words_of(pieces, written)
    ]


async def _pieces(calls: EngineCalls, tokens: Sequence[int]) -> list[TokenWord]:
    """Tokens with their texts; those that share a character together."""
    found, begin = list[TokenWord](), 0
    for end in range(1, len(tokens) + 1):
        text = await calls.detokenize(tokens[begin:end])
        if not text.endswith(_BROKEN) or end == len(tokens):
            found.append(TokenWord(text, begin, end))
            begin = end
    return found


class SegmentSpan(NamedTuple):
    """Tokens of one segment."""

    start: float
    """Seconds from the clip's beginning."""
    end: float
    tokens: list[int]
    """Its times included."""
    text_tokens: list[int]


def spans(
    tokens: Sequence[int], timestamp: Callable[[int], float | None], seconds: float
) -> list[SegmentSpan]:
    """Cut a clip's tokens at their times.

    A segment is text between two times; the next may begin later than it ends. Text before the first
    time begins with the clip, text after the last ends with it. Times beyond the clip are its end.

    Args:
        tokens: of the clip, end tokens left out.
        timestamp: seconds that a token stands for; None: it is text.
        seconds: length of the clip.
    """
    found: list[SegmentSpan] = []
    start, held, text = 0.0, list[int](), list[int]()
    for token in tokens:
        time = timestamp(token)
        if time is None:
            text.append(token)
            held.append(token)
            continue
        time = min(time, seconds)
        if text:
            found.append(SegmentSpan(start, max(start, time), [*held, token], text))
            held, text = [], []
        else:
            held = [token]
        start = time
    if text:
        found.append(SegmentSpan(start, max(start, seconds), held, text))
    return found


_OPENING = "\"'“¿([{-"
_CLOSING = "\"'.。,，!！?？:：”)]}、"


class TokenWord(NamedTuple):
    """Tokens ``begin`` to ``end`` of a clip are one word."""

    text: str
    begin: int
    end: int


def words_of(pieces: Sequence[TokenWord], language: str | None) -> list[TokenWord]:
    """Group tokens into words, punctuation with the word that it belongs to.

    Args:
        pieces: tokens, those that hold parts of a character together.
        language: in those without spaces each piece is a word.
    """
    words = pieces if language in UNSPACED else _split_at_spaces(pieces)
    return _with_punctuation(words)


def _split_at_spaces(pieces: Sequence[TokenWord]) -> list[TokenWord]:
    found: list[TokenWord] = []
    for piece in pieces:
        begins = piece.text.startswith(" ") or piece.text.strip() in string.punctuation
        if not found or begins:
            found.append(piece)
        else:
            last = found.pop()
            found.append(TokenWord(last.text + piece.text, last.begin, piece.end))
    return found


def _with_punctuation(words: Sequence[TokenWord]) -> list[TokenWord]:
    """Opening marks join the word after them, closing ones the word before."""
    found: list[TokenWord] = []
    for word in words:
        mark = word.text.strip()
        closes = bool(mark) and mark in _CLOSING and not word.text.startswith(" ")
        before = found[-1].text if found else ""
        opened = before.startswith(" ") and before.strip() != "" and before.strip() in _OPENING
        if found and (closes or opened):
            last = found.pop()
            found.append(TokenWord(last.text + word.text, last.begin, word.end))
        else:
            found.append(word)
    return [word for word in found if word.text.strip()]
