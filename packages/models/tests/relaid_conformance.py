"""The conformance suite for checkpoints that are not what transformers writes: published layouts, and
families whose code is their publishers' own, beside a class of transformers that computes the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from huggingface_hub import save_torch_state_dict
from model_families_conformance import FamilyConformance
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint, randomise


class Relaid:
    """A model of transformers that is saved as another one."""

    def __init__(self, suite: RelaidConformance, model: Any) -> None:
        self.suite, self.model = suite, model

    def __call__(self, ids: Tensor) -> Any:
        mask = self.suite.mask(ids.shape[1])
        return SimpleNamespace(logits=self.suite.logits(self.model, ids, mask))

    def save_pretrained(self, folder: Path, max_shard_size: str = "5GB") -> None:
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        config = {**self.suite.config_of(config), "architectures": [self.suite.published]}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        published = self.suite.tensors_of(tensors)
        apart = {
            name: tensor.clone(memory_format=torch.contiguous_format)
            for name, tensor in published.items()
        }
        save_torch_state_dict(apart, folder, max_shard_size=max_shard_size)


class RelaidConformance(FamilyConformance):
    """What is left for a family: how its checkpoints differ from those of the reference."""

    published: ClassVar[str]
    """The architecture's name in ``config.json``."""

    def architecture(self) -> str:
        return self.published

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        reference = self.hf_class()._from_config(
            self.hf_config(**overrides), attn_implementation="eager", dtype=torch.float32
        )
        self.prepare(reference)
        randomise(reference.eval(), seed)
        with torch.no_grad():
            self.finish(reference)
        relaid = Relaid(self, reference)
        relaid.save_pretrained(folder)
        return Checkpoint(relaid, folder)

    def prepare(self, reference: Any) -> None:
        """Change the reference's modules, before it gets its weights."""

    def finish(self, reference: Any) -> None:
        """Change its weights."""

    def mask(self, length: int) -> Tensor | None:
        """[1, heads, length, length], added to the scores; None: the reference's own."""
        return None

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        """[1, length, V] of ids [1, length]."""
        found: Tensor = model(ids, attention_mask=mask, use_cache=False).logits
        return found

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        """The published config, of the reference's."""
        return config

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The published tensors, of the reference's."""
        return tensors


def alibi_mask(slopes: Tensor, length: int) -> Tensor:
    """[1, heads, length, length]: nothing to come is seen, what is past loses by distance."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, torch.finfo(torch.float32).min)[None]


def rewrite(folder: Path, *, drop: tuple[str, ...] = (), **settings: Any) -> None:
    """Change a checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps({**kept, **settings}))


def renamed(folder: Path, spell: Callable[[str], str]) -> None:
    """Give a checkpoint's tensors other names."""
    file = folder / "model.safetensors"
    tensors = {spell(name): tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def add(folder: Path, more: Mapping[str, Tensor]) -> None:
    """Add tensors to a checkpoint."""
    file = folder / "model.safetensors"
    save_file({**load_file(file), **more}, file, metadata={"format": "pt"})
