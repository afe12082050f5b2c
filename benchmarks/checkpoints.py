"""Random checkpoints of real shapes: ``checkpoints.py FOLDER [NAME ...]``.

Weights are small normal numbers from a fixed seed, in bf16 safetensors; the tokenizer is a byte-level BPE
trained on Python's standard library and filled up so that every id of the vocabulary decodes to text.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192,
        "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "rope_theta": 10000.0,
    },
    "qwen06": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    },
    "llama1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 32768, "rope_theta": 500000.0,
    },
}  # fmt: skip
COMMON = {
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu", "eos_token_id": 2,
    "bos_token_id": None, "pad_token_id": 0, "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip


def make(name: str, folder: Path) -> Path:
    """Write checkpoint ``name`` below ``folder`` unless it is there; returns its path."""
    path = folder / name
    if (path / "model.safetensors").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[name], **COMMON}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    save_tokenizer(path, config["vocab_size"])
    torch.manual_seed(1234)
    save_file(_tensors(config), path / "model.safetensors", metadata={"format": "pt"})
    return path


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape) * 0.02).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": draw(config["vocab_size"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        tensors |= {f"{prefix}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
        ones = {f"{prefix}{n}.weight": torch.ones(size) for n, size in norms.items()}
        tensors |= {name: tensor.to(torch.bfloat16) for name, tensor in ones.items()}
    return tensors


def save_tokenizer(path: Path, vocab_size: int, marks: Sequence[str] = ()) -> dict[str, int]:
    """Write a tokenizer with further special tokens; returns the ids of these."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 8192), special_tokens=[*SPECIAL, *marks], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train([str(file) for file in files], trainer)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for token in range(len(vocabulary), vocab_size):
        vocabulary[f"\u0120w{token}"] = token  # U+0120 is how byte-level vocabularies write a space
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>", "chat_template": CHATML, "model_max_length": 32768,
            }
        )
    )  # fmt: skip
    return {mark: vocabulary[mark] for mark in marks}


def num_parameters(path: Path) -> int:
    """Parameters that a token's forward pass multiplies by (tied embeddings count once)."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        return sum(torch.Size(file.get_slice(n).get_shape()).numel() for n in file.keys())  # noqa: SIM118


def main() -> None:
    """Write the named checkpoints, or all of them."""
    parser = argparse.ArgumentParser(
        description="Write random checkpoints of real shapes, with a tokenizer that covers every id."
    )
    parser.add_argument("folder", type=Path, help="where they are written, each below its name")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHAPES)} (all)")
    args = parser.parse_args()
    for name in args.names:
        if name not in SHAPES:
            parser.error(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    for name in args.names or SHAPES:
        print(make(name, args.folder))


if __name__ == "__main__":
    main()
