#!/usr/bin/env python3
"""Write a checkpoint of the example's model, small and with random weights: ``make_checkpoint.py FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, BANDS, LAYERS, HEADS = 32, 20, 2, 4


def make(folder: Path) -> None:
    """The whole checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["SpeechExampleForCausalLM"],
        "model_type": "speech_example",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "num_bands": BANDS,
        "audio_token_id": tokenizer.token_to_id("<|audio|>"),
        "eos_token_id": tokenizer.token_to_id("<|end|>"),
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(_weights(config["vocab_size"]), folder / "model.safetensors")


def _tokenizer() -> Tokenizer:
    """One token for each byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|audio|>"])
    return tokenizer


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    weights = {
        "model.embed_tokens.weight": random(vocab_size, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "bands.weight": random(HIDDEN, BANDS),
        "bands.bias": torch.zeros(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{name}.self_attn.{projection}.weight"] = random(HIDDEN, HIDDEN)
        weights[f"{name}.mlp.gate_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = random(2 * HIDDEN, HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = random(HIDDEN, 2 * HIDDEN)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(HIDDEN)
    return weights


if __name__ == "__main__":
    make(Path(sys.argv[1]))
