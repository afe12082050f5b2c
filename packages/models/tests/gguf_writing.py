"""GGUF files of tiny checkpoints, written by the format's own package as llama.cpp's converter does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down",
           "up_proj": "up"}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

Choose = Callable[[str, Tensor], gguf.GGMLQuantizationType]
Encode = Callable[[np.ndarray, gguf.GGMLQuantizationType], np.ndarray]


def plain(name: str, tensor: Tensor) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32


def write(
    folder: Path,
    file: Path,
    architecture: str,
    choose: Choose = plain,
    extra: Mapping[str, Any] | None = None,
    splits: int = 0,
    encode: Encode = gguf.quants.quantize,
    omit: Sequence[str] = (),
) -> Path:
    """A GGUF file of a safetensors checkpoint.

    Args:
        architecture: GGUF's name of it.
        choose: type of a tensor's blocks.
        extra: further metadata.
        splits: tensors of each part; 0: one file.
        encode: makes blocks of floats [..., K], row by row.
        omit: GGUF's names of tensors that are left out.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=splits)
    for key, value in {**_metadata(config, architecture), **(extra or {})}.items():
        full = key.replace("ARCH", architecture)
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    for name, tensor in _tensors(load_file(folder / "model.safetensors"), config, architecture):
        if name in omit:
            continue
        array = tensor.float().numpy()
        kind = choose(name, tensor)
        if array.ndim < 2 or "norm" in name or "rope" in name:
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, encode(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if not splits:
        return file
    return next(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))


def _metadata(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    turning = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    found: dict[str, Any] = {
        "ARCH.context_length": config["max_position_embeddings"],
        "ARCH.embedding_length": config["hidden_size"],
        "ARCH.block_count": config["num_hidden_layers"],
        "ARCH.feed_forward_length": config["intermediate_size"],
        "ARCH.attention.head_count": heads,
        "ARCH.attention.head_count_kv": config["num_key_value_heads"],
        "ARCH.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "ARCH.rope.freq_base": float(full["rope_theta"]),
        "ARCH.rope.dimension_count": turning,
        "ARCH.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "general.name": "tiny",
    }
    if architecture != "phi3":
        found["ARCH.attention.key_length"] = head_dim
        found["ARCH.attention.value_length"] = head_dim
    if full.get("rope_type") == "linear":
        found["ARCH.rope.scaling.type"] = "linear"
        found["ARCH.rope.scaling.factor"] = float(full["factor"])
    if full.get("rope_type") == "longrope":
        original = full["original_max_position_embeddings"]
        stretch = config["max_position_embeddings"] / original
        found["ARCH.rope.scaling.original_context_length"] = original
        found["ARCH.rope.scaling.attn_factor"] = float(
            math.sqrt(1 + math.log(stretch) / math.log(original))
        )
    for key, name in (
        ("sliding_window", "attention.sliding_window"),
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("num_local_experts", "expert_count"),
        ("num_experts", "expert_count"),
        ("num_experts_per_tok", "expert_used_count"),
        ("moe_intermediate_size", "expert_feed_forward_length"),
        ("shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ):
        if config.get(key) is not None:
            found[f"ARCH.{name}"] = config[key]
    return found


def _tensors(
    held: dict[str, Tensor], config: Mapping[str, Any], architecture: str
) -> Iterator[tuple[str, Tensor]]:
    import torch

    rope = config["rope_parameters"]
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(rope, config["head_dim"])
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in held.items():
        new, value = _renamed(name, tensor, config, architecture)
        if ".experts." in name:
            experts.setdefault(new, []).append(value)
        else:
            yield new, value
    for name, values in experts.items():
        yield name, torch.stack(values)


def _renamed(
    name: str, tensor: Tensor, config: Mapping[str, Any], architecture: str
) -> tuple[str, Tensor]:
    stem, _, kind = name.rpartition(".")
    if stem in WHOLE:
        new = f"{WHOLE[stem]}.{kind}"
    else:
        _, _, layer, rest = stem.split(".", 3)
        names = {**LAYER, **(SANDWICH if architecture in ("gemma2", "gemma3") else {})}
        if ".experts." in name:
            new = f"blk.{layer}.ffn_{EXPERTS[rest.rpartition('.')[2]]}_exps.{kind}"
        else:
            new = f"blk.{layer}.{names[rest]}.{kind}"
    if architecture == "llama" and ("attn_q." in new or "attn_k." in new):
        heads = config["num_attention_heads" if "attn_q." in new else "num_key_value_heads"]
        pairs = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        tensor = pairs.transpose(1, 2).reshape(tensor.shape)
    if architecture.startswith("gemma") and "norm" in new:
        tensor = tensor + 1
    if new.endswith("shexp.weight") and "gate_inp" in new:
        tensor = tensor[0]
    return new, tensor


def _llama3_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """As the converter writes them: by what each frequency is divided."""
    import torch

    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for index in np.arange(0, head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors, dtype=torch.float32)
