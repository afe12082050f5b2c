"""Slots for adapters, and adapters of checkpoints that transformers has no class for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.model import BuildContext
from headrace_models.lora.adapters import Adapters
from headrace_models.lora.places import TablePlace


def stored_modules(folder: Path, slots: Adapters) -> dict[str, tuple[int, int]]:
    """Name -> outputs and inputs of each matrix of a checkpoint that is no table."""
    names = slots.names
    assert names is not None
    tables = {name for name, (place, *_) in names.by_name.items() if isinstance(place, TablePlace)}
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            match = names.map.find(name)
            if tensor.dim() != 2 or module == name or "norm" in module:
                continue
            if module in tables or (
                match and isinstance(names.places[match.place.leaf], TablePlace)
            ):
                continue
            outputs, inputs = tensor.shape
            turned = match is not None and match.rule.transposed
            found[module] = (inputs, outputs) if turned else (outputs, inputs)
    return found


def merge_files(folder: Path, into: Path, slots: Adapters, added: Mapping[str, Tensor]) -> None:
    """Write a checkpoint again with these terms in its weights."""
    for file in folder.glob("*.json"):
        (into / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [f"{module}.weight" for module in added if f"{module}.weight" in tensors]:
            module = name.removesuffix(".weight")
            term = added[module]
            tensors[name] = tensors[name] + (term.T if _turned(slots, module) else term)
        save_file(tensors, into / file.name, metadata={"format": "pt"})


def _turned(slots: Adapters, module: str) -> bool:
    """True if the checkpoint has the weight as [in, out]."""
    assert slots.names is not None
    match = slots.names.map.find(f"{module}.weight")
    return match is not None and match.rule.transposed


def with_adapters(
    context: BuildContext,
    *,
    max_loras: int = 2,
    max_lora_rank: int = 8,
    most: int = 64,
    towers: bool = False,
    fully_sharded: bool = False,
) -> tuple[BuildContext, Adapters]:
    """A context in which layers get places, and the slots."""
    slots = Adapters(
        context.ops,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        dtype=context.dtype,
        device=context.device,
        max_tokens=most,
        max_logits_rows=most,
        towers=towers,
        fully_sharded=fully_sharded,
    )
    return dataclasses.replace(context, adapters=slots), slots


def choose(slots: Adapters, rows: Sequence[int]) -> None:
    """The same slots for tokens and for rows of logits."""
    tensor = torch.tensor(rows, dtype=torch.int32)
    slots.choose(tensor, tensor)
