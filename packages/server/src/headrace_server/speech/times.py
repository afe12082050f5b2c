"""When what was heard was said: segments by the times among a clip's tokens, words by alignment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace_core.speech import SpeechModel
from headrace_server.side_by_side import in_order
from headrace_server.speech.clips import AT_ONCE, HEAVY, Heard, Task, num_told
from headrace_server.speech.protocol import Segment, Word
from headrace_server.speech.segments import spans
from headrace_server.speech.words import TokenWord, words_of
from headrace_server.state import ServerState

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class Times:
    """Tells times of clips; those of words by asking the engine once more.

    Args:
        speech: the engine's.
        engine_id: gives an id for each request.
    """

    def __init__(
        self, speech: SpeechModel, state: ServerState, engine_id: Callable[[], str]
    ) -> None:
        self._speech = speech
        self._state = state
        self._engine_id = engine_id

    async def segments(self, heard: Sequence[Heard]) -> list[Segment]:
        """Those of all clips."""
        found: list[Segment] = []
        for h in heard:
            for span in spans(h.token_ids, self._speech.timestamp, h.clip.audio.seconds):
                text = await self._text(span.text_tokens)
                found.append(
                    Segment(
                        id=len(found),
                        seek=round(h.clip.start * 100),
                        start=round(h.clip.start + span.start, 3),
                        end=round(h.clip.start + span.end, 3),
                        text=text,
                        tokens=span.tokens,
                        temperature=h.temperature,
                        avg_logprob=h.avg_logprob,
                        compression_ratio=h.compression_ratio,
                        no_speech_prob=h.no_speech_prob,
                    )
                )
        return found

    async def words(self, heard: Sequence[Heard], task: Task) -> list[Word]:
        """Those of all clips."""

        async def words_in(_: int, clip: Heard) -> list[Word]:
            return await self._words_of(clip, task)

        words = await in_order(words_in, heard, AT_ONCE)
        return [word for of_clip in words for word in of_clip]

    async def _words_of(self, heard: Heard, task: Task) -> list[Word]:
        """When a clip's words were spoken, by which part of it each token attends to."""
        model = self._state.engine.model
        plain = self._speech.prompt(heard.clip.audio, language=task.language, task=task.task)
        # Without times the prompt is longer: what filled the context may not fit any more.
        room = model.max_model_len - num_told(plain)
        tokens = [t for t in heard.token_ids if self._speech.timestamp(t) is None][:room]
        if not tokens:
            return []
        # The end token is aligned, too: where it begins the last word ends.
        sequence = [*tokens, *model.eos_token_ids[:1]][:room]
        weights = await self._state.engine.align(
            self._speech.continued(plain, sequence), self._engine_id()
        )
        times = await self._state.off_loop(
            HEAVY, self._speech.token_times, weights, len(sequence), heard.clip.audio.seconds
        )
        start = heard.clip.start
        times = [
            *(round(start + time, 2) for time in times),
            round(start + heard.clip.audio.seconds, 2),
        ]
        return [
            Word(word=word.text.strip(), start=times[word.begin], end=times[word.end])
            for word in words_of(await self._pieces(tokens), task.written)
        ]

    async def _pieces(self, tokens: Sequence[int]) -> list[TokenWord]:
        """Tokens with their texts; those that share a character together."""
        found, begin = list[TokenWord](), 0
        for end in range(1, len(tokens) + 1):
            text = await self._text(tokens[begin:end])
            if not text.endswith(_BROKEN) or end == len(tokens):
                found.append(TokenWord(text, begin, end))
                begin = end
        return found

    async def _text(self, tokens: Sequence[int]) -> str:
        return await self._state.engine.detokenize(tokens, skip_special_tokens=True)
