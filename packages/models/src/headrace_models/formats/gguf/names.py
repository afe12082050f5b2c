"""Names of GGUF tensors in the words of the models' checkpoints, and what the converter did to them.

Source: ggml's ``gguf.md`` (standardised names) and what llama.cpp's converter writes. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from headrace_core.errors import UnsupportedModel

_BASE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SETTINGS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that belong to the config."""


class Dialect(NamedTuple):
    """Differences of one architecture's files from the others'."""

    names: Mapping[str, str]
    permuted: bool = False
    """Rows of q and k are in the order of interleaved rotation."""
    norm_offset: float = 0.0
    """Number that the converter added to the weights of norms."""


DIALECTS: Mapping[str, Dialect] = {
    "llama": Dialect({**_BASE, **_MIXTRAL}, permuted=True),
    "qwen2": Dialect(_BASE),
    "qwen2moe": Dialect(_BASE),
    "qwen3": Dialect(_BASE),
    "qwen3moe": Dialect(_BASE),
    "gemma": Dialect(_BASE, norm_offset=1.0),
    "gemma2": Dialect({**_BASE, **_SANDWICH}, norm_offset=1.0),
    "gemma3": Dialect({**_BASE, **_SANDWICH}, norm_offset=1.0),
    "phi3": Dialect({**_BASE, "ffn_up": "mlp.gate_up_proj"}),
}
"""Dialect by ``general.architecture``."""


class Named(NamedTuple):
    """A GGUF tensor in the checkpoint's words."""

    stem: str
    """Stem as in :data:`_BASE`."""
    name: str
    """Name of the tensor; ``{}`` stands for the expert's number in a tensor of all experts."""


def checkpoint_name(dialect: Dialect, name: str) -> Named | None:
    """The checkpoint's name of a tensor; None if it belongs to the config.

    Raises:
        UnsupportedModel: the architecture has no such tensor.
    """
    # Older files have one tensor for each expert: blk.0.ffn_gate.3.weight.
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)", name)
    layer, stem, expert, kind = found.groups() if found is not None else (None, "", None, "")
    if stem in _SETTINGS:
        return None
    stem += "_exps" if expert is not None else ""
    known = dialect.names.get(stem)
    if known is None or (layer is None) != known.startswith(("model.", "lm_head")):
        raise UnsupportedModel(f"tensor {name!r} belongs to no layer of the architecture")
    prefix = f"model.layers.{layer}." if layer is not None else ""
    full = f"{prefix}{known}.{kind}"
    return Named(stem, full if expert is None else full.replace("{}", expert))
