"""Writing what was trained as a checkpoint in the Hugging Face layout, and nothing special."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_model.network import Llama, Shape
from demo_model.text import END_OF_TEXT, IM_END, SPECIAL, TEMPLATE, VISIBLE

_CARD = Path(__file__).with_name("card.md")


class Effort(NamedTuple):
    """What a training run took, for the model card."""

    steps: int
    tokens: int
    seconds: float
    seed: int


def export(model: Llama, tokenizer: Tokenizer, out: Path, effort: Effort) -> None:
    """Everything that `from_pretrained` reads, and a card that awaits the evaluation's figures."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # made private; a wheel would keep that
    tokenizer.save(str(out / "tokenizer.json"))
    shutil.copyfile(TEMPLATE, out / "chat_template.jinja")
    _write(out / "config.json", _config(model.shape, tokenizer))
    _write(out / "generation_config.json", _generation(tokenizer))
    _write(out / "tokenizer_config.json", _tokenizer_config(tokenizer))
    (out / "README.md").write_text(_card(model, effort), encoding="utf-8")


def _card(model: Llama, effort: Effort) -> str:
    return _CARD.read_text(encoding="utf-8").format(
        parameters=sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        steps=effort.steps,
        tokens=effort.tokens / 1e6,
        minutes=effort.seconds / 60,
        seed=effort.seed,
        **model.shape.as_dict(),
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """`rope_theta` is named twice: older readers look beside, newer ones in `rope_parameters`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape.as_dict(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(IM_END),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mlp_bias": False,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _generation(tokenizer: Tokenizer) -> dict[str, Any]:
    """A low temperature: there is one right answer to nearly everything that the model knows."""
    return {
        "do_sample": True,
        "eos_token_id": [tokenizer.token_to_id(token) for token in (IM_END, END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "temperature": 0.3,
        "top_k": 20,
        "top_p": 0.9,
    }


def _tokenizer_config(tokenizer: Tokenizer) -> dict[str, Any]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL,
        }
        for token in SPECIAL + VISIBLE
    }
    return {
        "add_bos_token": False,
        "added_tokens_decoder": dict(sorted(added.items(), key=lambda item: int(item[0]))),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": 2048,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
