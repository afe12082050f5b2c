"""Mistral's own ``params.json``, read as the ``config.json`` that says the same. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.json_object import read_object
from headrace_models.config.settings import MAX_HEAD_DIM, MAX_LAYERS, Settings

PARAMS = "params.json"
DEFAULT_LENGTH = 128_000
"""Context of a model whose params.json names none."""
_BOS, _EOS = 1, 2
"""Ids in every tokenizer of Mistral's."""
_OTHER_MODELS = ("lora", "ssm", "multimodal")
"""Keys of what is more than a decoder."""
_MIXTURE = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "first_k_dense_replace": "first_k_dense_replace",
    "route_every_n": "moe_layer_freq",
    "routed_scale": "routed_scaling_factor",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
"""Keys of mixtures with latent attention: Mistral's name -> ours."""
_ACTIVATIONS = {"NO_SCALES": "dynamic", "TENSOR": "static"}
"""``qscheme_act`` of FP8 weights -> transformers' ``activation_scheme``."""
_ENCODER_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size",
)  # fmt: skip
"""Keys of ``vision_encoder`` that have the same name in transformers' config."""
_IMAGE_TOKENS = {"image_token_id": 10, "image_break_token_id": 12, "image_end_token_id": 13}
"""Keys of ``vision_encoder`` -> the ids in every tokenizer that has them."""
_MERGES = "patch_merge"
"""``mm_projector_id`` of models that make a vector of a square of patches."""
_OF_WHOLE = ("architectures", "quantization_config")
_SIDE = 1024
"""Longest side of images where no setting says it."""
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def has_params(folder: Path, load_format: str) -> bool:
    """True if ``params.json`` describes the folder's model: there is no config.json, or the user asks for
    Mistral's format."""
    stated = folder.is_dir() and (folder / PARAMS).is_file()
    return stated and (load_format.lower() == "mistral" or not (folder / "config.json").is_file())


def read_params(folder: Path) -> Settings:
    """Raises: UnsupportedModel: there is no params.json, or it cannot be read."""
    return Settings(read_object(folder / PARAMS, required=True), file=PARAMS)


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
        UnsupportedModel: a value is wrong, or it describes more than a decoder; names the key.
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
    encoder = _block(params, "vision_encoder")
    text = _text_config(params)
    return text if encoder is None or not encoder.config else _seeing_config(encoder, text)


def encoder_head_dim(params: Settings) -> int:
    """Size of a head of the encoder of images.

    Raises: UnsupportedModel: there is none, or its sizes do not fit.
    """
    encoder = _block(params, "vision_encoder") or Settings({}, file=PARAMS)
    size, rest = divmod(encoder.integer("hidden_size"), encoder.integer("num_attention_heads"))
    if rest or not size:
        raise UnsupportedModel(
            f"params.json: vision_encoder.hidden_size = {encoder.integer('hidden_size')}: must be a multiple "
            f"of num_attention_heads = {encoder.integer('num_attention_heads')}"
        )
    return size


def _seeing_config(encoder: Settings, text: Mapping[str, Any]) -> dict[str, Any]:
    """Config of a model that takes images, with that of its language model in it."""
    projector = encoder.config.get("mm_projector_id") or ""
    if projector not in ("", _MERGES):
        raise UnsupportedModel(
            f"params.json: vision_encoder.mm_projector_id = {projector!r:.200}: must be {_MERGES!r} or left "
            "out"
        )
    merge = encoder.integer("spatial_merge_size", 1)
    if not projector and merge != 1:
        raise UnsupportedModel(
            f"params.json: vision_encoder.spatial_merge_size = {merge}: must be 1 without mm_projector_id"
        )
    own = {key: encoder.integer(key) for key in _ENCODER_SIZES}
    whole = {key: value for key, value in text.items() if key not in _OF_WHOLE}
    blocks = {key: text[key] for key in ("quantization_config",) if key in text}
    return {
        **blocks,
        "architectures": ["PixtralForConditionalGeneration"],
        "model_type": "pixtral",
        "text_config": whole,
        "vision_config": {
            **own,
            "model_type": "pixtral",
            "num_channels": encoder.integer("num_channels", 3),
            "image_size": encoder.integer("max_image_size", encoder.integer("image_size", _SIDE)),
            "rope_theta": encoder.positive("rope_theta", 10_000.0),
            "hidden_act": "silu",
        },
        "spatial_merge_size": merge if projector else None,
        "projector_norm": encoder.flag("add_pre_mm_projector_layer_norm", False),
        "multimodal_projector_bias": encoder.flag("adapter_bias", True),
        **{key: encoder.integer(key, token, minimum=0) for key, token in _IMAGE_TOKENS.items()},
    }


def _text_config(params: Settings) -> dict[str, Any]:
    """Config of the decoder."""
    if params.config.get("kv_lora_rank"):
        return _latent_config(params)
    rope, sharpens = _rope(params)
    mixture = _block(params, "moe")
    if mixture is not None and sharpens:
        raise UnsupportedModel(
            "params.json: moe and llama_4_scaling without kv_lora_rank: no such model is supported"
        )
    kind, name = ("ministral3", "Ministral3") if sharpens else ("mistral", "Mistral")
    experts: dict[str, Any] = {}
    if mixture is not None:
        kind, name = "mixtral", "Mixtral"
        experts = {
            "num_local_experts": mixture.integer("num_experts"),
            "num_experts_per_tok": mixture.integer("num_experts_per_tok"),
        }
    return {
        **_common(params),
        **experts,
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        "num_key_value_heads": params.integer("n_kv_heads", params.integer("n_heads")),
        "head_dim": head_dim(params),
        "sliding_window": params.optional_integer("sliding_window"),
        "rope_parameters": rope,
    }


def _common(params: Settings) -> dict[str, Any]:
    length = params.integer(
        "max_position_embeddings", params.integer("max_seq_len", DEFAULT_LENGTH)
    )
    return {
        "hidden_size": params.integer("dim"),
        "intermediate_size": params.integer("hidden_dim"),
        "num_hidden_layers": params.integer("n_layers", maximum=MAX_LAYERS),
        "num_attention_heads": params.integer("n_heads"),
        "vocab_size": params.integer("vocab_size"),
        "rms_norm_eps": params.positive("norm_eps", 1e-5),
        "hidden_act": params.config.get("activation") or "silu",
        "tie_word_embeddings": params.flag("tied_embeddings", False),
        "max_position_embeddings": length,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        **_quantization(params),
    }


def _quantization(params: Settings) -> dict[str, Any]:
    """``quantization_config``, if weights are in FP8 with a scale for each tensor."""
    block = _block(params, "quantization")
    if block is None or not block.config:
        return {}
    served = {"qformat_weight": ("fp8_e4m3",), "qscheme_act": (None, *_ACTIVATIONS)}
    for key in {**served, **block.config}:
        value, accepted = block.config.get(key), served.get(key, (None,))
        if value not in accepted:
            raise UnsupportedModel(
                f"params.json: quantization.{key} = {value!r:.200}: must be "
                f"{' or '.join(map(repr, accepted))}"
            )
    scheme = _ACTIVATIONS[block.config.get("qscheme_act") or "NO_SCALES"]
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}


def _latent_config(params: Settings) -> dict[str, Any]:
    """Config of Mistral Large 3: latent attention, and mixtures behind the first layers."""
    rope, _ = _rope(params)
    if rope["rope_type"] == "yarn" and "attention_factor" not in rope:
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}  # the scale is one of scores
    mixture = _block(params, "moe")
    said = {} if mixture is None else mixture.config
    return {
        **_common(params),
        **{ours: said[theirs] for theirs, ours in _MIXTURE.items() if theirs in said},
        **{name: params.config.get(name) for name in _LATENT},
        "architectures": ["MistralLarge3ForCausalLM"],
        "model_type": "mistral4",
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "rope_parameters": rope,
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
    return Settings(value, file=PARAMS)
