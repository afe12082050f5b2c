"""Adapters of random numbers in files as PEFT writes them, and a model with one merged into its weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
SCALE = 0.05


def linear_modules(model: Any) -> dict[str, tuple[int, int]]:
    """Name -> outputs and inputs of each linear module of a transformers model; a head that is the table of
    input vectors left out, which merging would change, too."""
    table = model.get_input_embeddings()
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(module).__name__ == "Conv1D":
            found[name] = weight.shape[1], weight.shape[0]
        elif isinstance(module, torch.nn.Linear) and weight is not getattr(table, "weight", None):
            found[name] = weight.shape[0], weight.shape[1]
    return found


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if one of the patterns is in the name."""
    return any(re.search(pattern, name) for pattern in patterns)


def write_adapter(
    folder: Path,
    modules: Mapping[str, tuple[int, int]],
    rank: int = 4,
    seed: int = 0,
    scale: float = SCALE,
    **settings: Any,
) -> dict[str, Tensor]:
    """Write an adapter of these modules; returns what it adds to each weight [out, in].

    Args:
        modules: name -> outputs and inputs.
        scale: of the products of the factors, whose numbers are about 1 / sqrt(inputs).
        settings: of ``adapter_config.json``.
    """
    chooser = torch.Generator().manual_seed(seed)
    stored, added = dict[str, Tensor](), dict[str, Tensor]()
    for name, (outputs, inputs) in modules.items():
        down = torch.randn(rank, inputs, generator=chooser) / inputs**0.5
        up = torch.randn(outputs, rank, generator=chooser) / rank**0.5
        stored |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        added[name] = scale * up @ down
    folder.mkdir(exist_ok=True, parents=True)
    save_file(
        {PREFIX + name: tensor for name, tensor in stored.items()},
        folder / "adapter_model.safetensors",
    )
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": rank * scale, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(stated), encoding="utf-8")
    return added


def merged(model: Any, added: Mapping[str, Tensor]) -> Any:
    """A copy of a transformers model with these terms in its weights."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for name, term in added.items():
            module = made.get_submodule(name)
            module.weight += term.T if type(module).__name__ == "Conv1D" else term
    return made
