"""Mistral's own ``params.json``, read as the ``config.json`` that says the same. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.json_object import read_object
from headrace_models.settings import MAX_HEAD_DIM, MAX_LAYERS, Settings

PARAMS = "params.json"
DEFAULT_LENGTH = 128_000
"""Context of a model whose params.json names none."""
_BOS, _EOS = 1, 2
"""In every tokenizer of Mistral's."""
_OTHER_MODELS = ("moe", "vision_encoder", "quantization", "q_lora_rank", "lora", "ssm")
"""Keys of what is more than a plain decoder."""


def has_params(folder: Path, load_format: str) -> bool:
    """Whether it is ``params.json`` that describes the folder's model: there is no config.json, or the
    user asks for Mistral's format."""
    stated = folder.is_dir() and (folder / PARAMS).is_file()
    return stated and (load_format.lower() == "mistral" or not (folder / "config.json").is_file())


def read_params(folder: Path) -> Settings:
    """Raises: UnsupportedModel: there is no params.json, or it cannot be read."""
    return Settings(read_object(folder / PARAMS, required=True))


def head_dim(params: Settings) -> int:
    """Size of a head, ``dim / n_heads`` unless it is named."""
    if params.config.get("head_dim") is not None:
        return params.integer("head_dim", maximum=MAX_HEAD_DIM)
    heads = params.integer("n_heads")
    size, rest = divmod(params.integer("dim"), heads)
    if rest or not 1 <= size <= MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"params.json: dim = {params.integer('dim')}: must be a multiple of n_heads = {heads}"
        )
    return size


def mistral_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of the model that params.json describes.

    Raises:
        UnsupportedModel: a value is wrong, or it describes more than a dense decoder of text; names
            the key.
    """
    params = read_params(folder)
    for key in _OTHER_MODELS:
        if params.config.get(key):
            raise UnsupportedModel(
                f"{folder / PARAMS}: {key!r} is not supported; use the repository's files in the "
                "layout of transformers"
            )
    if isinstance(params.config.get("sliding_window"), list):
        raise UnsupportedModel(
            f"{folder / PARAMS}: sliding_window is a list, which is not supported; use the "
            "repository's files in the layout of transformers"
        )
    length = params.integer(
        "max_position_embeddings", params.integer("max_seq_len", DEFAULT_LENGTH)
    )
    rope, sharpens = _rope(params)
    return {
        "architectures": ["Ministral3ForCausalLM" if sharpens else "MistralForCausalLM"],
        "model_type": "ministral3" if sharpens else "mistral",
        "hidden_size": params.integer("dim"),
        "intermediate_size": params.integer("hidden_dim"),
        "num_hidden_layers": params.integer("n_layers", maximum=MAX_LAYERS),
        "num_attention_heads": params.integer("n_heads"),
        "num_key_value_heads": params.integer("n_kv_heads", params.integer("n_heads")),
        "head_dim": head_dim(params),
        "vocab_size": params.integer("vocab_size"),
        "rms_norm_eps": params.positive("norm_eps", 1e-5),
        "hidden_act": params.config.get("activation") or "silu",
        "sliding_window": params.optional_integer("sliding_window"),
        "tie_word_embeddings": params.flag("tied_embeddings", False),
        "max_position_embeddings": length,
        "rope_parameters": rope,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
    }


def _rope(params: Settings) -> tuple[dict[str, Any], bool]:
    """The rotary settings, and whether queries grow with their position (Ministral 3)."""
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": params.positive("rope_theta", 10_000.0),
    }
    yarn = _block(params, "yarn")
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.positive("factor"),
            "original_max_position_embeddings": yarn.integer("original_max_position_embeddings"),
            "beta_fast": yarn.positive("beta", 32.0),
            "beta_slow": yarn.positive("alpha", 1.0),
        }
        if not yarn.flag("apply_scale", True):
            rope["attention_factor"] = 1.0
    sharpening = _block(params, "llama_4_scaling")
    if sharpening is None:
        return rope, False
    original = sharpening.integer("original_max_position_embeddings")
    if rope.setdefault("original_max_position_embeddings", original) != original or yarn is None:
        raise UnsupportedModel(
            f"params.json: llama_4_scaling.original_max_position_embeddings = {original}: must be "
            "yarn's"
        )
    return {**rope, "llama_4_scaling_beta": sharpening.number("beta")}, True


def _block(params: Settings, name: str) -> Settings | None:
    value = params.config.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"params.json: {name} = {value!r:.200}: must be an object")
    return Settings(value)
