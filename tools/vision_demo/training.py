"""The training loop: pictures are painted as they are needed, each with a few exchanges about it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vision_demo.network import IMAGE_TOKENS, Teacher, build
from vision_demo.pictures import COLOURS, SHAPES, Scene, draw_scene, paint
from vision_demo.text import Encoder, about, train_tokenizer, without_picture

_TURNS = 4
_IGNORE = -100


@dataclass(frozen=True)
class Settings:
    """What `train` was asked for."""

    state: Path
    minutes: float
    seed: int = 1
    batch: int = 48
    learning_rate: float = 2e-3
    muon_rate: float = 5e-3
    warmup: int = 100


class Batch(NamedTuple):
    """One picture for each row but the last two, which have none."""

    ids: Tensor
    targets: Tensor
    pixels: Tensor
    scenes: list[Scene]


def pixels_of(pictures: list[np.ndarray]) -> Tensor:
    """[H, W, 3] of bytes -> [B, 3, H, W] in -1 to 1, as preprocessor_config.json says."""
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1


def batches(encoder: Encoder, seed: int, size: int) -> Iterator[Batch]:
    """Without end."""
    rng = random.Random(seed)
    while True:
        scenes = [draw_scene(rng) for _ in range(size)]
        pictures = [np.asarray(paint(scene, rng)) for scene in scenes]
        rows = [encoder.conversation(about(scene, rng, _TURNS), IMAGE_TOKENS) for scene in scenes]
        rows += [encoder.conversation(without_picture(rng), 0) for _ in range(2)]
        longest = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        targets = torch.full((len(rows), longest), _IGNORE)
        for place, (known, answered) in enumerate(rows):
            ids[place, : len(known)] = torch.tensor(known)
            learned = [
                token if said else _IGNORE for token, said in zip(known, answered, strict=True)
            ]
            targets[place, : len(known)] = torch.tensor(learned)
        yield Batch(ids, targets, pixels_of(pictures), scenes)


class Trainer:
    """Model, teacher, optimizers and how far they are."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.tokenizer = train_tokenizer(settings.seed)
        self.model = build(self.tokenizer.get_vocab_size())
        self.teacher = Teacher(self.model.config.vision_config.hidden_size)
        self.step = 0
        self.seconds = 0.0
        self._optimizers = self._make_optimizers()

    def run(self) -> None:
        """Trains for the minutes asked for; saves the state each two minutes."""
        source = batches(
            Encoder(self.tokenizer), self.settings.seed + 1000 * self.step, self.settings.batch
        )
        budget, begin, before = self.settings.minutes * 60, time.monotonic(), self.seconds
        saved = begin
        with tqdm(total=round(budget), unit="s") as bar:
            while self.seconds < budget:
                loss, taught = self._update(next(source))
                now = time.monotonic()
                self.seconds = before + now - begin
                bar.n = round(self.seconds)
                bar.set_postfix(step=self.step, loss=f"{loss:.3f}", tower=f"{taught:.3f}")
                if now - saved > 120:
                    self.save()
                    saved = now
        self.save()

    def _update(self, batch: Batch) -> tuple[float, float]:
        rate = self._schedule()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * rate
        with torch.autocast("cpu", torch.bfloat16):
            vectors, patches = self._look(batch.pixels)
            loss = self._speak(batch, vectors)
            taught = self._taught(patches, batch.scenes)
        (loss + taught).backward()
        torch.nn.utils.clip_grad_norm_([*self.model.parameters(), *self.teacher.parameters()], 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item(), taught.item()

    def _look(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The tower's patches, and what the projector makes of them."""
        inner = self.model.model
        patches = inner.vision_tower(pixels, output_hidden_states=True).hidden_states[-1][:, 1:]
        return inner.multi_modal_projector(patches), patches

    def _speak(self, batch: Batch, vectors: Tensor) -> Tensor:
        inner = self.model.model
        inputs = inner.language_model.embed_tokens(batch.ids)
        shown = (batch.ids == self.model.config.image_token_id).unsqueeze(-1)
        inputs = inputs.masked_scatter(shown, vectors.to(inputs.dtype))
        hidden = inner.language_model(inputs_embeds=inputs).last_hidden_state
        learned = batch.targets[:, 1:] != _IGNORE
        logits = self.model.lm_head(hidden[:, :-1][learned])
        return F.cross_entropy(logits.float(), batch.targets[:, 1:][learned])

    def _taught(self, patches: Tensor, scenes: list[Scene]) -> Tensor:
        counts, colours, digit = self.teacher(patches.float())
        known = torch.zeros(len(scenes), len(SHAPES), dtype=torch.long)
        coloured = torch.zeros_like(known)
        digits = torch.tensor([10 if scene.digit is None else scene.digit for scene in scenes])
        for row, scene in enumerate(scenes):
            for thing in scene.things:
                known[row, SHAPES.index(thing.shape)] = thing.count
                coloured[row, SHAPES.index(thing.shape)] = list(COLOURS).index(thing.colour) + 1
        losses = (
            F.cross_entropy(counts.flatten(0, 1).float(), known.flatten()),
            F.cross_entropy(colours.flatten(0, 1).float(), coloured.flatten()),
            F.cross_entropy(digit.float(), digits),
        )
        return sum(losses, torch.zeros(()))

    def _schedule(self) -> float:
        """Warms up, stays, and falls over the last four tenths of the time."""
        left = 1 - self.seconds / (self.settings.minutes * 60)
        return min(1.0, (self.step + 1) / self.settings.warmup) * min(1.0, max(0.02, left / 0.4))

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        named = [*self.model.named_parameters(), *self.teacher.named_parameters()]
        matrices = [p for name, p in named if p.dim() == 2 and "layers." in name]
        others = [p for name, p in named if not (p.dim() == 2 and "layers." in name)]
        muon = torch.optim.Muon(
            matrices, lr=self.settings.muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(
            others, lr=self.settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["base"] = group["lr"]
        return [muon, adam]

    def save(self) -> None:
        """State from which `resume` goes on."""
        self.settings.state.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "teacher": self.teacher.state_dict(),
            "optimizers": [one.state_dict() for one in self._optimizers],
            "step": self.step,
            "seconds": self.seconds,
        }
        fresh = self.settings.state.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.settings.state)

    def resume(self) -> None:
        """Takes what `save` left."""
        state = torch.load(self.settings.state, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.teacher.load_state_dict(state["teacher"])
        for optimizer, known in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(known)
        self.step, self.seconds = state["step"], state["seconds"]


def num_parameters(model: torch.nn.Module) -> int:
    """Tied ones once."""
    return sum(math.prod(parameter.shape) for parameter in model.parameters())
