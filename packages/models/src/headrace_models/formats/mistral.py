"""Mistral's own checkpoints: ``consolidated*.safetensors`` beside ``params.json``.

They differ from transformers' in names, and in the order of query and key rows: rotary pairs are
neighbours there, and half a head apart here. Both are changed while reading.
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
from headrace_models.formats.mistral_config import has_params, head_dim, read_params
from headrace_models.formats.safetensors import read_tensors

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight)")
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
}
_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PAIRED = (".q_proj.weight", ".k_proj.weight")


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
        """By transformers' names. Raises: WeightsError naming the file."""
        size = head_dim(read_params(path))
        headers = checkpoint_headers(path, CONSOLIDATED)
        for stored, tensor, file in read_tensors(headers, progress, eager=self.eager):
            name = transformers_name(stored)
            yield (
                name,
                halves(tensor, size, stored, file) if name.endswith(_PAIRED) else tensor,
                file,
            )


def transformers_name(name: str) -> str:
    """What transformers calls a tensor of Mistral's; unknown names stay."""
    found = _LAYER.fullmatch(name)
    if found is None or found[2] not in _IN_LAYER:
        return _OUTSIDE.get(name, name)
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"


def halves(weight: Tensor, head_dim: int, name: str, file: Path) -> Tensor:
    """[heads * D, K], rows of a rotary pair from neighbours to half a head apart."""
    if weight.dim() != 2 or weight.shape[0] % head_dim or head_dim % 2:
        raise WeightsError(
            f"{file}: tensor {name!r} has shape {list(weight.shape)}: its rows must be whole heads of "
            f"{head_dim}"
        )
    pairs = weight.view(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
