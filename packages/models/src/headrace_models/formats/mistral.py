"""Mistral's own checkpoints: ``consolidated*.safetensors`` beside ``params.json``.

They differ from transformers' in names, and in the order of query and key rows: rotary pairs are
neighbours there, and half a head apart here, except in latent attention. Both are changed while reading, of
the encoder of images as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_core.model import ProgressCallback, ignore_progress
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.index import CONSOLIDATED, checkpoint_files, checkpoint_headers
from headrace_models.formats.mistral_config import (
    encoder_head_dim,
    has_params,
    head_dim,
    read_params,
)
from headrace_models.formats.safetensors import read_tensors

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|qscale_weight|qscale_act)")
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "gate": "mlp.gate",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
}
_EXPERT = re.compile(r"(feed_forward\.)?experts\.(\d+)\.(w[123])")
_EXPERT_PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PAIRED = (".q_proj.weight", ".k_proj.weight")
_ENCODER, _TOWER = "vision_encoder.", "vision_tower."
_IN_ENCODER = {
    ".attention.wq.": ".attention.q_proj.",
    ".attention.wk.": ".attention.k_proj.",
    ".attention.wv.": ".attention.v_proj.",
    ".attention.wo.": ".attention.o_proj.",
    ".feed_forward.w1.": ".feed_forward.gate_proj.",
    ".feed_forward.w3.": ".feed_forward.up_proj.",
    ".feed_forward.w2.": ".feed_forward.down_proj.",
}
_BEHIND_ENCODER = {
    "vision_language_adapter.w_in.": "multi_modal_projector.linear_1.",
    "vision_language_adapter.w_out.": "multi_modal_projector.linear_2.",
    "patch_merger.": "multi_modal_projector.patch_merger.",
    "pre_mm_projector_norm.": "multi_modal_projector.norm.",
}
"""Beginnings of names of what makes vectors of images."""


class MistralFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    Args:
        load: ``safetensors_load_strategy`` decides between mapping files and reading them whole.
    """

    name = "mistral"

    def __init__(self, load: LoadConfig) -> None:
        extra_config(load, {})
        self.load_format = load.load_format
        self.eager = load.safetensors_load_strategy == "eager"

    def recognises(self, path: Path) -> bool:
        return has_params(path, self.load_format) and bool(checkpoint_files(path, CONSOLIDATED))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Tensors by transformers' names. Raises: WeightsError naming the file."""
        params = read_params(path)
        paired = () if params.config.get("kv_lora_rank") else _PAIRED
        headers = checkpoint_headers(path, CONSOLIDATED)
        for stored, tensor, file in read_tensors(headers, progress, eager=self.eager):
            name = transformers_name(stored)
            if name.startswith(_TOWER):
                if name.endswith(_PAIRED):
                    tensor = halves(tensor, encoder_head_dim(params), stored, file)
            elif name.endswith(paired):
                tensor = halves(tensor, head_dim(params), stored, file)
            yield name, tensor, file


def transformers_name(name: str) -> str:
    """Name that transformers has for a tensor of Mistral's; unknown names stay."""
    found = _LAYER.fullmatch(name)
    if found is None:
        return _OUTSIDE.get(name) or _seeing_name(name)
    expert = _EXPERT.fullmatch(found[2])
    if expert is not None and expert[1]:  # Mixtral
        return (
            f"model.layers.{found[1]}.block_sparse_moe.experts.{expert[2]}.{expert[3]}.{found[3]}"
        )
    if expert is not None:
        part = _EXPERT_PARTS[expert[3]]
        return f"model.layers.{found[1]}.mlp.experts.{expert[2]}.{part}.{found[3]}"
    if found[2] not in _IN_LAYER:
        return name
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"


def _seeing_name(name: str) -> str:
    """Of what makes vectors of images; other names stay."""
    if name.startswith(_ENCODER):
        name = _TOWER + name.removeprefix(_ENCODER)
        for theirs, ours in _IN_ENCODER.items():
            name = name.replace(theirs, ours)
        return name
    for theirs, ours in _BEHIND_ENCODER.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def halves(weight: Tensor, head_dim: int, name: str, file: Path) -> Tensor:
    """[heads * D, K], rows of a rotary pair from neighbours to half a head apart."""
    if weight.dim() != 2 or weight.shape[0] % head_dim or head_dim % 2:
        raise WeightsError(
            f"{file}: tensor {name!r} has shape {list(weight.shape)}: its rows must be whole heads of "
            f"{head_dim}"
        )
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
