#!/usr/bin/env python3
"""Writes the demo model, and what guesses for it, at the size of a real model, and measures the guesses.

    python tools/widen_demo_model.py                # needs tools/train_eagle_head.py and train_draft_model.py
    python tools/widen_demo_model.py measure --measured 8 --rounds 3

The demo model's step takes less time than the Python around it, so no guess can pay there. The models that
this script writes say the same, by weights of another size: they are ``--factor`` times as wide, and the
model has ``--layers`` layers. With 8 and 22 these are the layers of a Llama of 1.1 billion parameters (hidden
size 2048, 32 heads), without its large vocabulary.

- The hidden state is the small one's, ``factor`` times side by side: norms see the same mean square, and
  weights are copied and divided by the factor, a power of two, so that sums are the same but for their order.
- Heads, and the inner columns of MLPs, are there several times, too.
- Further layers add zeros.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from demo_model.guessing import measure
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import demo

_BUILD = Path(__file__).resolve().parents[1] / "build"
_WIDE = _BUILD / "wide"


def widened(name: str, tensor: Tensor, factor: int, config: dict[str, int]) -> Tensor:
    """One weight at ``factor`` times the width.

    Args:
        name: of the weight, in Hugging Face's form.
        tensor: [out, in], or [H].
        config: the small model's.
    """
    if tensor.dim() == 1:
        return tensor.repeat(factor)
    if "embed_tokens" in name:
        return tensor.repeat(1, factor)
    if name.startswith("fc."):  # of an embedding and a state, which are widened each
        parts = [part.repeat(factor, factor) for part in tensor.chunk(2, dim=1)]
        return torch.cat(parts, dim=1) / factor
    if ".self_attn." in name and ".o_proj." not in name:
        return _heads(tensor, name, factor, config).repeat(1, factor) / factor
    if ".o_proj." in name:
        queries = _heads(tensor.T.contiguous(), name, factor, config).T
        return queries.repeat(factor, 1) / factor
    return tensor.repeat(factor, factor) / factor


def _heads(rows: Tensor, name: str, factor: int, config: dict[str, int]) -> Tensor:
    """Rows by head: each key-value head ``factor`` / 2 times, with each of its queries twice as often."""
    queries, keys = config["num_attention_heads"], config["num_key_value_heads"]
    heads = rows.view(-1, config["head_dim"], rows.shape[1])
    if ".k_proj." in name or ".v_proj." in name:
        order = [n % keys for n in range(keys * _key_copies(factor))]
    else:
        group, copies = queries // keys, factor // _key_copies(factor)
        order = [
            key * group + query % group
            for key in (n % keys for n in range(keys * _key_copies(factor)))
            for query in range(group * copies)
        ]
    return heads[order].reshape(-1, rows.shape[1])


def _key_copies(factor: int) -> int:
    return max(1, factor // 4)


def widen(source: Path, out: Path, *, factor: int, layers: int | None = None) -> Path:
    """Write a wider checkpoint of a Llama, or of its EAGLE head; returns its folder.

    Args:
        source: folder of the small one.
        factor: a power of two.
        layers: of the wide one; None: as many as there are.
    """
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    small = load_file(source / "model.safetensors")
    tensors = {n: widened(n, t, factor, config).contiguous() for n, t in small.items()}
    own = config["num_hidden_layers"]
    for number in range(own, layers or own):
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(tensors[name]) if adds else tensors[name].clone()
            tensors[name.replace(".0.", f".{number}.", 1)] = copy
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        config[name] *= factor
    config["num_key_value_heads"] *= _key_copies(factor)
    config["num_hidden_layers"] = layers or own
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for file in source.glob("*.j*"):  # tokenizer, template
        if not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["write", "measure"], help="default: both")
    parser.add_argument("--out", type=Path, default=_WIDE, help="folder of the wide ones")
    parser.add_argument("--head", type=Path, default=_BUILD / "eagle-head")
    parser.add_argument("--draft", type=Path, default=_BUILD / "draft-model")
    parser.add_argument("--factor", type=int, default=8, choices=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=22, help="of the wide model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--guesses", type=int, default=4, help="measure: at most, a step")
    parser.add_argument("--measured", type=int, default=8, help="measure: questions")
    parser.add_argument("--rounds", type=int, default=3, help="measure: turns")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    out: Path = arguments.out
    if arguments.command != "measure":
        widen(demo.path(), out / "model", factor=arguments.factor, layers=arguments.layers)
        widen(arguments.head, out / "eagle-head", factor=arguments.factor)
        widen(arguments.draft, out / "draft-model", factor=arguments.factor)
    if arguments.command != "write":
        guesses = {"num_speculative_tokens": arguments.guesses}
        configs = {
            "eagle": {"method": "eagle", "model": str(out / "eagle-head"), **guesses},
            "draft_model": {"method": "draft_model", "model": str(out / "draft-model"), **guesses},
        }
        measure(configs, count=arguments.measured, rounds=arguments.rounds, model=out / "model")


if __name__ == "__main__":
    main()
