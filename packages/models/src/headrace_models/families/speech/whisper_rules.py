"""Which tokens may follow which in a Whisper transcript.

The rules of github.com/openai/whisper, ``decoding.py`` (``SuppressBlank``, ``SuppressTokens``,
``ApplyTimestampRules``): timestamps come in pairs and never go back, the first is early, and where
some timestamp is likelier than any single word, there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.config import PluginSettings
from headrace_core.sampling.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)
from headrace_core.sampling.params import SamplingParams
from headrace_models.families.speech.whisper_tokens import WhisperTokens, latest_first, listed_ids
from headrace_models.resolve import checkpoint_folder, generation_config

if TYPE_CHECKING:
    from torch import Tensor

_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class _Transcript:
    """One request, as the rules see it."""

    timestamps: bool
    output: list[int]
    """Live: what was sampled so far."""


class WhisperRules(LogitsProcessor):
    """``suppress_tokens`` and ``begin_suppress_tokens`` of the generation config for every request;
    the rules of timestamps where the prompt does not say ``<|notimestamps|>``."""

    def __init__(self, config: PluginSettings, device: torch.device, is_pin_memory: bool) -> None:
        path = checkpoint_folder(config.model, config.load)
        generation = generation_config(config.model, path)
        self.tokens = WhisperTokens.of(path, generation)
        self.generation = generation
        self.never, self.never_first = (
            torch.tensor(listed_ids(generation, key), dtype=torch.int64, device=device)
            for key in ("suppress_tokens", "begin_suppress_tokens")
        )
        latest = latest_first(generation)
        self.last_first = None if latest is None else self.tokens.first_timestamp + latest
        self.checked = 0
        self.timed = True
        """Whether a transcript can have timestamps at all: else it is text, whatever its prompt says."""
        self.transcripts: dict[int, _Transcript] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.transcripts, batch_update, self._begun)

    def _begun(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> _Transcript:
        return _Transcript(self.tokens.wants_timestamps(prompt_ids or []), output_ids)

    def apply(self, logits: Tensor) -> Tensor:
        self._drop_beyond(logits.shape[1])
        for slot, transcript in self.transcripts.items():
            row = logits[slot]
            if not transcript.output:
                row[self.never_first] = _NEVER
            row[self.never] = _NEVER
            if transcript.timestamps and self.timed:
                self._pair(row, transcript.output)
                self._prefer_timestamps(row)
        return logits

    def _drop_beyond(self, vocab_size: int) -> None:
        """Lists may name tokens that this checkpoint's vocabulary does not reach."""
        if vocab_size != self.checked:
            self.never = self.never[self.never < vocab_size]
            self.never_first = self.never_first[self.never_first < vocab_size]
            self.timed = self.tokens.says_timestamps(self.generation, vocab_size)
            self.checked = vocab_size

    def _pair(self, row: Tensor, output: list[int]) -> None:
        """Timestamps in pairs, but for one before the end; each pair not before the last."""
        first = self.tokens.first_timestamp
        row[self.tokens.no_timestamps] = _NEVER
        if not output:
            row[:first] = _NEVER
            if self.last_first is not None:
                row[self.last_first + 1 :] = _NEVER
            return
        opens = output[-1] >= first
        closes = opens and (len(output) < 2 or output[-2] >= first)
        if closes:
            row[first:] = _NEVER
        elif opens:
            row[: self.tokens.end] = _NEVER
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:
            # The second of a pair may repeat the first; a new segment takes some time.
            row[first : last if opens and not closes else last + 1] = _NEVER

    def _prefer_timestamps(self, row: Tensor) -> None:
        """If all timestamps together are likelier than the likeliest other token, one comes."""
        first = self.tokens.first_timestamp
        if bool(row[first:].logsumexp(0) > row[:first].max()):
            row[:first] = _NEVER
