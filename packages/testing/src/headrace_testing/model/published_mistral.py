"""Models of transformers in the layout of Mistral's own files: ``params.json`` and tensors under other names,
with rotary pairs as neighbours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}  # fmt: skip
ENCODER = {
    "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3",
    "down_proj": "w2", "vision_tower": "vision_encoder",
}  # fmt: skip
BEHIND = {
    "multi_modal_projector.linear_1": "vision_language_adapter.w_in",
    "multi_modal_projector.linear_2": "vision_language_adapter.w_out",
    "multi_modal_projector.patch_merger": "patch_merger",
    "multi_modal_projector.norm": "pre_mm_projector_norm",
}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size",
    "image_size",
)  # fmt: skip


def save_published(model: Any, folder: Path, *, image_token: int, **encoder: Any) -> None:
    """Write a model of LLaVA's or Mistral 3's class with Pixtral's tower. Needs safetensors.

    Args:
        encoder: what ``vision_encoder`` says beside its sizes.
    """
    from safetensors.torch import save_file

    text, vision = model.config.text_config, model.config.vision_config
    size = text.hidden_size // text.num_attention_heads
    text.head_dim = text.head_dim or size
    stated = {
        **{key: getattr(vision, key) for key in _SIZES}, "num_channels": 3, "rope_theta": 10_000.0,
        "image_token_id": image_token, "image_break_token_id": 12, "image_end_token_id": 13, **encoder,
    }  # fmt: skip
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    tied = head.data_ptr() == embedding.data_ptr()
    params = {**params_of(text), "tied_embeddings": tied, "vision_encoder": stated}
    (folder / "params.json").write_text(json.dumps(params))
    inner = vision.hidden_size // vision.num_attention_heads
    tensors = with_encoder(model.state_dict(), (text.head_dim, inner))
    if tied:
        tensors.pop("output.weight")
    save_file(tensors, folder / "consolidated.safetensors")


def params_of(config: Any) -> dict[str, Any]:
    """``params.json`` of a decoder's config."""
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": config.head_dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": getattr(config, "sliding_window", None),
        "max_position_embeddings": config.max_position_embeddings,
    }


def relaid(tensors: Mapping[str, Tensor], head_dim: int) -> dict[str, Tensor]:
    """Under Mistral's names, with rotary pairs as neighbours; head_dim 0: as they are."""
    result = {}
    for name, tensor in tensors.items():
        if head_dim and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.view(-1, 2, head_dim // 2, tensor.shape[1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        stem = name.removesuffix(".weight")
        for theirs, own in NAMES.items():
            stem = stem.replace(theirs, own)
        result[f"{stem.removeprefix('model.')}.weight"] = tensor.contiguous()
    return result


def with_encoder(tensors: Mapping[str, Tensor], head_dims: tuple[int, int]) -> dict[str, Tensor]:
    """Under Mistral's names, with rotary pairs as neighbours.

    Args:
        head_dims: of the decoder, and of the encoder.
    """
    text, found = {}, {}
    for name, tensor in tensors.items():
        name = name.removeprefix("model.")
        if not name.startswith(("vision_tower.", "multi_modal_projector.")):
            name = name.replace("language_model.model.", "language_model.")
            name = name.removeprefix("language_model.")
            text[name if name.startswith("lm_head") else f"model.{name}"] = tensor
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.view(-1, 2, head_dims[1] // 2, tensor.shape[1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        for theirs, own in {**ENCODER, **BEHIND}.items():
            name = name.replace(theirs, own)
        found[name] = tensor.contiguous()
    return {**relaid(text, head_dims[0]), **found}
