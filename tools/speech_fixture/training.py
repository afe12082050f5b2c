"""The training loop: clips with noise and shifts, as transcripts with and without times, or as silence."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from speech_fixture.checkpoint import make_extractor, make_model, make_tokenizer
from speech_fixture.voices import HELD_OUT, RATE, SECONDS, VOICES, Utterance, spoken

BATCH = 32
POOL, GROWTH = 4000, 8
"""Utterances to be synthesized, so many of them a step; each is heard with other noise every time."""
LEARNING_RATE, WARM_UP = 1e-3, 200
SILENCE = 0.05
"""Share of clips in which nobody speaks."""
_IGNORED = -100


class Trainer:
    """Model, optimizer, and how far they are.

    Args:
        state: file that :meth:`resume` reads and :meth:`run` writes.
        seed: of weights, voices and noise.
    """

    def __init__(self, state: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self._state, self._seed = state, seed
        self._tokenizer = make_tokenizer()
        self._extract = make_extractor()
        self.model = make_model(self._tokenizer)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, weight_decay=0.01
        )
        self._draw = random.Random(seed)
        self.step = 0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def resume(self) -> None:
        """Go on from the state's file, if it is there."""
        if not self._state.is_file():
            return
        saved = torch.load(self._state, weights_only=True)
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self._draw.seed(self._seed + self.step)

    def run(self, minutes: float) -> None:
        """Train so long; the time for synthesizing counts."""
        end = time.monotonic() + 60 * minutes
        pool, said = spoken(self._draw.randrange(1 << 30), BATCH, VOICES), time.monotonic()
        self.model.train()
        while time.monotonic() < end:
            if len(pool) < POOL:
                pool += spoken(self._draw.randrange(1 << 30), GROWTH, VOICES)
            loss = self._update(self._draw.choices(pool, k=BATCH))
            if time.monotonic() - said > 20:
                said = time.monotonic()
                print(f"step {self.step}: loss {loss:.3f}", flush=True)
                self._save()
        self._save()

    def word_error(self, count: int) -> float:
        """Wrong, missing and additional words by spoken words, on voices held out."""
        self.model.eval()
        wrong = total = 0
        for one in spoken(self._seed + 2, count, HELD_OUT):
            with torch.inference_mode():
                tokens = self.model.generate(
                    self._features([one.samples]), language="en", task="transcribe",
                    max_new_tokens=20, do_sample=False,
                )  # fmt: skip
            heard = self._tokenizer.decode(tokens[0].tolist(), skip_special_tokens=True).split()
            wrong += _distance(heard, one.text.split())
            total += len(one.text.split())
        return wrong / total

    def _update(self, batch: Sequence[Utterance]) -> float:
        """One step; returns its loss."""
        samples, targets = zip(*map(self._noisy, batch), strict=True)
        ids = torch.full((len(batch), max(map(len, targets))), _IGNORED)
        for row, target in zip(ids, targets, strict=True):
            row[: len(target)] = torch.tensor(target)
        logits = self.model(
            input_features=self._features(samples), decoder_input_ids=ids[:, :-1].clamp(min=0)
        ).logits
        loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=_IGNORED)
        for group in self._optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (self.step + 1) / WARM_UP)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.step += 1
        return loss.item()

    def _noisy(self, one: Utterance) -> tuple[np.ndarray, list[int]]:
        """A clip somewhere in silence and noise, and what is to be written for it."""
        draw, clip = self._draw, np.zeros(SECONDS * RATE, np.float32)
        noise = np.random.default_rng(draw.randrange(1 << 30)).normal(0, 1, len(clip))
        clip += (noise * 10 ** draw.uniform(-4, -2)).astype(np.float32)
        if draw.random() < SILENCE:
            return clip, self._ids("<|startoftranscript|>", "<|nospeech|>")
        begin = draw.randrange(min(RATE, len(clip) - len(one.samples)) + 1)
        clip[begin : begin + len(one.samples)] += one.samples * draw.uniform(0.3, 1.0)
        words = self._tokenizer.encode(f" {one.text}").ids
        head = self._ids("<|startoftranscript|>", "<|en|>", "<|transcribe|>")
        end = self._ids("<|endoftext|>")
        if draw.random() < 0.5:
            return clip, [*head, *self._ids("<|notimestamps|>"), *words, *end]
        opens, closes = self._time(begin), self._time(begin + len(one.samples))
        return clip, [*head, opens, *words, closes, *end]

    def _time(self, sample: int) -> int:
        """The token of a time."""
        return self._tokenizer.get_vocab_size() + round(sample / RATE * 50)

    def _ids(self, *names: str) -> list[int]:
        return [self._tokenizer.token_to_id(name) for name in names]

    def _features(self, clips: Sequence[np.ndarray]) -> Tensor:
        found: Tensor = self._extract(
            list(clips), sampling_rate=RATE, return_tensors="pt"
        ).input_features
        return found

    def _save(self) -> None:
        self._state.parent.mkdir(parents=True, exist_ok=True)
        part = self._state.with_suffix(".part")
        saved = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save({**saved, "step": self.step}, part)
        part.replace(self._state)


def _distance(heard: Sequence[str], spoken_words: Sequence[str]) -> int:
    """Levenshtein's, by words."""
    row = list(range(len(spoken_words) + 1))
    for i, word in enumerate(heard, 1):
        before, row[0] = row[0], i
        for j, wanted in enumerate(spoken_words, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != wanted))
    return row[-1]
