"""Tiny checkpoints of one architecture with different weights, and copies with a fault each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 300
WEIGHTS = "model.safetensors"
A_TENSOR = "model.layers.1.mlp.down_proj.weight"


def make_llama(folder: Path, seed: int, **settings: Any) -> Path:
    """Weights whose greedy answers depend on the seed from the first token on."""
    torch.manual_seed(seed)
    config = LlamaConfig(**{
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "initializer_range": 0.2, **settings,
    })  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def perturbed(source: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose weights are a little different ones."""
    shutil.copytree(source, folder)
    made = torch.Generator().manual_seed(7)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.dim() > 1:
                noise = torch.randn(tensor.shape, generator=made)
                tensors[name] = (tensor.float() + 0.3 * tensor.float().std() * noise).to(
                    tensor.dtype
                )
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


def _with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return damage


def _with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_TENSOR][3, 5] = float("nan")


def _with_other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[A_TENSOR] = tensors[A_TENSOR][:, :-1].contiguous()


def _cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def _without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _with_other_eos(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": 7}))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (
        _with_tensors(lambda tensors: tensors.pop(A_TENSOR)),
        f"tensors are missing from the checkpoint: '{A_TENSOR}'",
    ),
    "NaN": (_with_tensors(_with_nan), f"tensor '{A_TENSOR}' [64, 128] has 1 NaN"),
    "other shape": (_with_tensors(_with_other_shape), f"tensor '{A_TENSOR}' has shape [64, 127]"),
    "cut file": (_cut, WEIGHTS),
    "no config": (_without_config, "config.json"),
    "other end token": (_with_other_eos, "eos_token_ids is (7,)"),
}
"""Name -> what makes it of a sound checkpoint, and a part of the error's message."""
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "other vocabulary": ({"vocab_size": VOCAB + 20}, f"vocab_size is {VOCAB + 20}"),
    "other heads": ({"num_key_value_heads": 4}, "caches"),
    "another layer": ({"num_hidden_layers": 3}, "caches"),
}
"""Name -> settings of a sound checkpoint that is another model, and a part of the error's message."""


def make_faulty(folder: Path, sound: Path) -> dict[str, tuple[Path, str]]:
    """One of each kind: name -> checkpoint, and a part of the message that refuses it."""
    made = {}
    for name, (damage, message) in FAULTS.items():
        shutil.copytree(sound, folder / name)
        damage(folder / name)
        made[name] = folder / name, message
    for name, (settings, message) in OTHERS.items():
        made[name] = make_llama(folder / name, 1, **settings), message
    return made
